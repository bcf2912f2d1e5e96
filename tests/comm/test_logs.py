"""Log lines of a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIGNALS = 3000
RANK = f"""
import logging, os, signal, sys, threading, time
from pathlib import Path
from rose_dist.comm.logs import configure_logging

configure_logging(1, "host", Path(sys.argv[1]))
handled = []

def on_signal(*_):
    handled.append(None)
    logging.info("%d in the handler", len(handled))

def send():
    for _ in range({SIGNALS}):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.0001)

signal.signal(signal.SIGUSR1, on_signal)
sender = threading.Thread(target=send)
sender.start()
written = 0
while sender.is_alive():
    logging.info("%d written", written)
    written += 1
logging.info("the end")
print(written + len(handled) + 1)
"""


def test_a_signal_handler_may_log_while_a_line_is_written(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", RANK, tmp_path], capture_output=True, text=True, check=True)
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert result.stderr == ""
    assert len(lines) == int(result.stdout)
    assert all("[1@host] INFO root: " in line for line in lines)
