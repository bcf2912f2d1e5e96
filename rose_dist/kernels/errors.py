"""What kernels raise before any launch."""

from rose_dist.errors import RoseError


class KernelError(RoseError):
    """Base of the errors of `rose_dist.kernels`."""


class KernelArgumentError(KernelError, ValueError):
    """An argument that the kernel can't take; the message names it, what was given and what is allowed."""


class UnsupportedArchError(KernelError):
    """The GPU is neither Hopper nor Blackwell."""


class MissingToolchainError(KernelError):
    """CuTeDSL is not installed."""


class CompileInCaptureError(KernelError):
    """A kernel was first used inside CUDA graph capture, where it can be neither compiled nor loaded."""
