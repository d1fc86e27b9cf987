"""Public models, OLMoE and Qwen3-MoE: their `config.json`, weights and tokenizer, for `--checkpoint`."""
