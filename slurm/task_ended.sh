#!/bin/sh
# Slurm runs this on a task's node when the task has ended, whatever the reason.
[ "$SLURM_PROCID" != 0 ] || : >"$ROSE_ENDED"
