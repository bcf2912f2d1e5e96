"""The folder that one mpirun has for its session."""

from __future__ import annotations

from pathlib import Path

from rose_dist.cli.supervise import session_folder

BASE = "PRTE_MCA_prte_local_tmpdir_base"


def test_each_launch_has_a_folder_of_its_own_while_it_runs() -> None:
    with session_folder({"A": "1"}) as one, session_folder({}) as other:
        assert one["A"] == "1"
        assert one[BASE] != other[BASE]
        assert Path(one[BASE]).is_dir()
    assert not Path(one[BASE]).exists()


def test_a_base_for_all_hosts_stays_alone() -> None:
    """mpirun refuses both."""
    chosen = {"PRTE_MCA_prte_tmpdir_base": "/somewhere"}
    with session_folder(chosen) as found:
        assert found == chosen
