"""A small Llama of transformers', with random weights."""


def small_llama(**changes):
    """Return one of two layers in fp32; `changes` are fields of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))
