"""`rose kernels`: compile every kernel, on any machine, and show what came out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from rose_dist.kernels import binary, jit, registry
from rose_dist.kernels.arch import ARCHS


@click.command("kernels")
@click.option("--arch", "names", multiple=True, help="sm_90a, sm_100a or sm_103a; default: sm_90a and sm_100a.")
@click.option("--only", default="", help="Only kernels whose label contains this.")
def command(names: Sequence[str], only: str) -> None:
    """Compile all kernels without a GPU and print registers, stack and access widths.

    Exits with status 1 if a kernel spills registers.
    """
    unknown = sorted(set(names) - set(ARCHS))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(ARCHS)}", param_hint="--arch")
    click.echo(f"{'regs':>4} {'stack':>5} {'load':>4} {'store':>5} {'ms':>5}  kernel")
    count, seconds, spilled = 0, 0.0, []
    for name in names or ("sm_90a", "sm_100a"):
        for kernel in registry.kernels(ARCHS[name]):
            if only not in kernel.label:
                continue
            compiled = jit.compile_binary(kernel)
            facts = binary.facts(compiled)
            count, seconds = count + 1, seconds + compiled.seconds
            if facts.stack_bytes:
                spilled.append(kernel.label)
            click.echo(
                f"{facts.registers:4} {facts.stack_bytes:5} {facts.widest_load:4} {facts.widest_store:5} "
                f"{compiled.seconds * 1e3:5.0f}  {kernel.label}"
            )
    click.echo(f"{count} kernels compiled in {seconds:.1f} s, {len(spilled)} with spills")
    if spilled:
        sys.exit(1)
