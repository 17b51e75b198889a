"""Build a GPT from upstream's configuration, as releases from 0.19 on do."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec
from mqo.megatron.attention.spec import with_local_attention

from .releases import Provider


@dataclass(kw_only=True)
class ProvidedConfig(GPTModelConfig):
    """Upstream's configuration of a GPT that a model provider builds."""

    builder: ClassVar[str] = f"{__name__}.ProvidedBuilder"
    provider: Provider | None = None


class ProvidedBuilder(GPTModelBuilder):
    """Upstream's builder, which calls the configuration's provider for each chunk."""

    def build_model(self, *groups: ProcessGroupCollection, **parts: Any) -> LanguageModule:
        """Return this rank's chunk of the model; `parts` are as in `model_provider`."""
        config = self._model_config
        return config.provider(config=config.transformer, **parts)


def provided_config(args: Namespace, provider: Provider) -> ProvidedConfig:
    """Return the configuration of `args` whose chunks `provider` builds."""
    config = gpt_config_from_args(args, model_config_cls=ProvidedConfig)
    config.provider = provider
    return config


def gpt_config(
    args: Namespace, transformer: TransformerConfig | None, *, local_attention: bool
) -> GPTModelConfig:
    """Return upstream's configuration; Transformer Engine's layers can have local attention."""
    config = gpt_config_from_args(args, transformer)
    if local_attention:
        config.transformer_layer_spec = _engine_layers
    return config


def _engine_layers(config: GPTModelConfig, vp_stage: int | None = None) -> ModuleSpec:
    return with_local_attention(default_layer_spec(config, vp_stage))
