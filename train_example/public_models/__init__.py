"""Public models, OLMoE, Qwen3-MoE and gpt-oss: their `config.json`, weights and tokenizer, for `--checkpoint`."""
