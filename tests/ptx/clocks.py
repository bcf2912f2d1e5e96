"""Vector clocks of all threads of a run: who has seen what.

Thread t's clock says for every thread u up to which of u's epochs t knows u's writes; an epoch ends when u publishes
(a release or a barrier). Clocks are rows of one matrix; threads that left a barrier together share a row, so a barrier
costs one row whatever the block size. The last column stands for the host, which every thread has seen. A second
matrix holds, for each location that was read while its writer was not ordered before the reader, the newest write that
the thread knows (coherence).
"""

from dataclasses import dataclass

import numpy as np

from tests.ptx.number_formats import Array

_FLAGS = 64
_ROWS = 64


@dataclass(frozen=True)
class View:
    """What a release publishes: the releaser's clock and its knowledge of racy locations."""

    clock: Array
    flags: Array


class Clocks:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.epoch = np.ones(threads, np.int32)
        self.row = np.zeros(threads, np.int64)
        self.matrix = np.zeros((_ROWS, threads + 1), np.int32)
        self.matrix[:, -1] = np.iinfo(np.int32).max
        self.flags = np.zeros((len(self.matrix), _FLAGS), np.int32)
        self._next = 1

    def ordered(self, threads: Array, writer: Array, epoch: Array) -> Array:
        """Whether `writer`'s write of `epoch` happens before what `threads` do now; the arrays broadcast. Writer −1
        is the host.
        """
        return (epoch <= self.matrix[self.row[threads], writer]) | (writer == threads)

    def view(self, thread: int) -> View:
        row = self.row[thread]
        clock = self.matrix[row].copy()
        clock[thread] = self.epoch[thread]
        return View(clock, self.flags[row].copy())

    def publish(self, thread: int) -> View:
        """A snapshot for a release; later writes of the thread belong to a new epoch."""
        view = self.view(thread)
        self.epoch[thread] += 1
        return view

    def acquire(self, threads: Array, view: View) -> None:
        """Each of `threads` learns what the view holds; those that shared a row go on sharing one."""
        rows = self.row[threads]
        groups = [threads] if (rows == rows[0]).all() else [threads[rows == row] for row in np.unique(rows)]
        for group in groups:
            new = self._new_row()
            old = self.row[group[0]]
            np.maximum(self.matrix[old], view.clock, out=self.matrix[new])
            self.flags[new] = self.flags[old]
            known = self.flags[new, : len(view.flags)]
            np.maximum(known, view.flags, out=known)
            self.row[group] = new

    def join(self, threads: Array) -> None:
        """A barrier: everybody learns what anybody knew or wrote."""
        new = self._new_row()
        rows = np.unique(self.row[threads])
        self.matrix[new] = self.matrix[rows].max(0) if len(rows) > 1 else self.matrix[rows[0]]
        self.flags[new] = self.flags[rows].max(0)
        own = self.matrix[new, threads]
        self.matrix[new, threads] = np.maximum(own, self.epoch[threads])
        self.row[threads] = new
        self.epoch[threads] += 1

    def start_after(self, threads: Array, earlier: Array) -> None:
        """`threads` begin (or go on) with all that `earlier` did."""
        new = self._new_row()
        rows = np.unique(np.concatenate([self.row[threads], self.row[earlier]]))
        self.matrix[new] = self.matrix[rows].max(0)
        self.flags[new] = self.flags[rows].max(0)
        self.matrix[new, earlier] = np.maximum(self.matrix[new, earlier], self.epoch[earlier])
        self.row[threads] = new
        self.epoch[earlier] += 1

    def floor(self, thread: int, flag: int) -> int:
        return int(self.flags[self.row[thread], flag]) if flag < self.flags.shape[1] else 0

    def observe(self, thread: int, flag: int, stamp: int) -> None:
        """The thread read the write numbered `stamp` of racy location `flag`: it never goes back behind it."""
        if flag >= self.flags.shape[1]:
            self.flags = np.concatenate([self.flags, np.zeros_like(self.flags)], axis=1)
        row = self.row[thread]
        if self.flags[row, flag] >= stamp:
            return
        if np.count_nonzero(self.row == row) > 1:
            new = self._new_row()
            row = self.row[thread]
            self.matrix[new], self.flags[new] = self.matrix[row], self.flags[row]
            self.row[thread] = row = new
        self.flags[row, flag] = stamp

    def _new_row(self) -> int:
        """A free row; may renumber the others, so look row numbers up after this call."""
        if self._next == len(self.matrix):
            used, renumbered = np.unique(self.row, return_inverse=True)
            self.matrix[: len(used)] = self.matrix[used]
            self.flags[: len(used)] = self.flags[used]
            self.row = renumbered.astype(np.int64)
            self._next = len(used)
            if 2 * len(used) > len(self.matrix):
                self.matrix = np.concatenate([self.matrix, np.zeros_like(self.matrix)])
                self.matrix[:, -1] = np.iinfo(np.int32).max
                self.flags = np.concatenate([self.flags, np.zeros_like(self.flags)])
        self._next += 1
        return self._next - 1
