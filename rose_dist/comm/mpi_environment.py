"""What Open MPI must be told, whoever starts the ranks. Scripts and tests take it from here."""

from __future__ import annotations

import os
from collections.abc import Mapping


def mpi_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the variables that rank processes and mpirun need; what `base` sets already stays.

    - `pml=ob1`, `osc=^ucx`: the wheel's UCX parts probe for hardware and complain where there is none.
    - `mpi_yield_when_idle`: with more ranks than cores a waiting rank must not starve the one it waits for.
    - `btl_sm_eager_limit`: a token's rows at decode go in one message instead of three.
    - `oob_tcp_keepalive_…`: mpirun and its daemons notice a host that is gone after 12 to 14 s.
    - `OMPI_ALLOW_RUN_AS_ROOT…`, for root alone: containers run as root, and mpirun refuses it otherwise.
    """
    defaults = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_sm_eager_limit": "32768",
        "OMPI_MCA_btl_sm_max_send_size": "65536",
        "PRTE_MCA_oob_tcp_keepalive_time": "2",
        "PRTE_MCA_oob_tcp_keepalive_intvl": "4",
        "PRTE_MCA_oob_tcp_keepalive_probes": "3",
    }
    if os.geteuid() == 0:
        defaults |= {
            f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
        }
    return defaults | dict(base)
