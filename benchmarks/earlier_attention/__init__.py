"""What decode attention was before, for comparison; see `paged_attention`."""
