"""Qwen3-ASR against transformers on the CPU, with a small random checkpoint and a small trained one."""
