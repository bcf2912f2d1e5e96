"""What mpirun and srun tell a rank by its environment, and whether MPI agrees."""

from __future__ import annotations

from collections.abc import Mapping

from rose_dist.errors import RoseError

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
"""Variables that mpirun or srun set for MPI processes; without any of them the world is this process."""
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether mpirun or srun has started this process as a rank."""
    return any(name in environment for name in _LAUNCHED)


def expected_rank(environment: Mapping[str, str]) -> str:
    """This rank, for messages before MPI has said which; `?` if the launcher has not."""
    return next((environment[name] for name in _RANK_VARIABLES if name in environment), "?")


class LaunchError(RoseError):
    """The launcher and MPI do not agree on the ranks."""


def check_launch(environment: Mapping[str, str]) -> None:
    """Raises `LaunchError` if srun started several tasks, but without telling them of each other."""
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and not is_launched(environment):
        raise LaunchError(
            f"srun started {environment['SLURM_STEP_NUM_TASKS']} tasks without MPI: each would be alone; "
            "use srun --mpi=pmix (srun --mpi=list shows what this cluster has)"
        )


def check_size(environment: Mapping[str, str], size: int) -> None:
    """Raises `LaunchError` if MPI has another number of ranks than the launcher started."""
    started = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("SLURM_STEP_NUM_TASKS") or size
    if int(started) != size:
        raise LaunchError(
            f"{started} ranks were started, but MPI sees {size}: mpi4py's MPI library is not the launcher's; "
            "use the mpirun of the same Open MPI, or srun --mpi=pmix"
        )
