"""What can be wrong with a checkpoint that is to be made or translated."""

from rose_dist.errors import RoseError


class ConversionError(RoseError):
    """The source isn't a checkpoint that can be translated, or the target can't hold it."""
