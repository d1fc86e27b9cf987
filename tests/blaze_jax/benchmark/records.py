"""What files of results hold."""


def result(*records):
    values = {"platform": "gpu", "device": "A GPU", "driver": "1", "cuda": "13.0", "jax": "0", "date": "2026-11-20"}
    return {"environment": values, "command": "made up for a test", "records": list(records)}


def scaling_record(tokens, ns):
    sizes = {"num_tokens": tokens, "model_width": 512, "expert_width": 2048, "num_experts": 4, "experts_per_token": 1}
    return {"kind": "scaling", "sizes": sizes, "ns_per_token": ns, "saved_bytes_per_token": 8200.0}
