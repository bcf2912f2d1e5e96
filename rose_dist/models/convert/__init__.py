"""Making and translating GPT-OSS checkpoints."""
