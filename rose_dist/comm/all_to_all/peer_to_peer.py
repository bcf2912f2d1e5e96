"""Rows between data-parallel GPUs of several nodes: NVLink inside a node, NVSHMEM's messages between nodes."""

from __future__ import annotations

from collections.abc import Callable

from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.nvlink import NvLink, exchange_layout
from rose_dist.comm.all_to_all.protocol import AllToAllConfig
from rose_dist.comm.symmetric_memory import Ranks, Region
from rose_dist.comm.topology import Topology
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.expert_exchange import ExpertExchange
from rose_dist.kernels.network_exchange import NetworkExchange
from rose_dist.kernels.network_layout import NetworkLayout


class PeerToPeer(NvLink):
    """As `NvLink`, with ranks across the network among the group's."""

    def __init__(
        self,
        config: AllToAllConfig,
        group: Ranks,
        topology: Topology,
        options: GpuOptions,
        take: Callable[[int], Region],
        sms: int,
    ) -> None:
        """Collective over `group`. `take`: as for `NvLink`; the addresses of ranks of other nodes are not used."""
        self.topology, self._rails = topology, topology.rails if config.rail_forwarding else None
        super().__init__(config, group, options, take, sms)

    def lay_out(self, config: AllToAllConfig, ranks: int, in_flight: int) -> ExchangeLayout:
        return network_layout(config, self.topology, in_flight).exchange

    def build(
        self, group: Ranks, options: GpuOptions, take: Callable[[int], Region], region: Region, sms: int
    ) -> ExpertExchange:
        network = take(network_layout(self.config, self.topology, options.in_flight).region_bytes)
        regions = tuple(0 if self.topology.is_far(rank) else address for rank, address in enumerate(region.addresses))
        return NetworkExchange(
            self.layout, options.device, group.rank, regions, network=network.addresses[group.rank],
            far=self.topology.far, rails=self._rails, packed=options.layout, result_dtype=self.config.expert_dtype,
            sms=sms,
        )  # fmt: skip


def network_layout(config: AllToAllConfig, topology: Topology, in_flight: int) -> NetworkLayout:
    """Of the memory that messages need, and of the rest. Raises `LayoutError` for `rail_forwarding` between nodes that
    are not alike, and `KernelArgumentError` for sizes that don't fit.
    """
    if config.rail_forwarding:
        topology.require_rails()
    members = len(topology.members[0]) if config.rail_forwarding else 1
    summing = members if config.rail_forwarding and config.partial_sums else 0
    exchange = exchange_layout(config, len(topology.nodes), in_flight, network=True, node_ranks=summing)
    return NetworkLayout(exchange, members)
