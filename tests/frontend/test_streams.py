"""The order in which the outputs of one engine step reach the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from rose_dist.engine.protocol import EngineStats, Generate, Output, Outputs, Ready, SamplingParams
from rose_dist.frontend.engine_client import EngineClient
from rose_dist.frontend.generation import Generation


def generate(request_id: str) -> Generate:
    return Generate(request_id=request_id, prompt=[1], sampling=SamplingParams())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def order_of_one_step() -> list[str]:
    context = zmq.Context.instance()
    leader = context.socket(zmq.ROUTER)
    port = leader.bind_to_random_port("tcp://127.0.0.1")
    client = EngineClient([f"tcp://127.0.0.1:{port}"])
    client.open()
    identity, _ = leader.recv_multipart()
    ready = Ready(
        dp_rank=0, dp_size=1, max_context=99, kv_capacity=99, max_running=9, max_waiting=9, layout="one leader"
    )
    leader.send_multipart([identity, msgspec.msgpack.encode(ready)])
    await until(lambda: client.ready)
    running = [client.start([generate(f"running {i}")]) for i in range(3)]
    fresh = [client.start([generate(f"fresh {i}")]) for i in range(2)]
    told: list[str] = []
    for generation in running:
        generation.listen(lambda generation=generation: told.append(generation.take()[0][1].request_id))

    async def first_output(generation: Generation) -> None:
        told.append((await generation.receive())[0][1].request_id)

    tasks = [asyncio.create_task(first_output(generation)) for generation in fresh]
    await asyncio.sleep(0)
    names = ["running 0", "fresh 0", "running 1", "running 2", "fresh 1"]
    message = Outputs(outputs=[Output(request_id=name, token_ids=[7]) for name in names], stats=EngineStats())
    leader.send_multipart([identity, msgspec.msgpack.encode(message)])
    await until(lambda: len(told) == len(names))
    for task in tasks:
        await task
    client.close()
    leader.close()
    return told


def test_first_outputs_go_before_those_of_running_streams() -> None:
    told = asyncio.run(order_of_one_step())
    assert told == ["fresh 0", "fresh 1", "running 0", "running 1", "running 2"]
