"""Families of published models by their `model_type`, and the types that are refused for a reason."""

from types import MappingProxyType

from crosscut.config.published.families.attention import ATTENTION_FAMILIES
from crosscut.config.published.families.delta import DELTA_FAMILIES
from crosscut.config.published.families.experts import EXPERT_FAMILIES
from crosscut.config.published.families.family import SOFT_CAP_FIELD, Family
from crosscut.config.published.families.latent import LATENT_FAMILIES
from crosscut.config.published.families.state_space import STATE_SPACE_FAMILIES

FAMILIES = MappingProxyType(
    {
        family.model_type: family
        for family in (
            *ATTENTION_FAMILIES,
            *EXPERT_FAMILIES,
            *LATENT_FAMILIES,
            *STATE_SPACE_FAMILIES,
            *DELTA_FAMILIES,
        )
    }
)
"""Families by `model_type`."""

REFUSED = MappingProxyType(
    {
        "falcon_h1": "whose layers run attention and a state-space mixer side by side on one input",
        "zamba2": "whose layers share one block of attention and an MLP, which also reads the embedding",
        "gpt_oss": "whose experts have biases and another gate",
    }
)
"""Reasons why models of other types do not fit `ModelConfig`, as clauses that follow the type."""

AS_OTHERS = MappingProxyType({"mistral": "llama", "roberta": "bert"})
"""Families whose models Crosscut exports as those of another family, which has the same layers."""

__all__ = ["AS_OTHERS", "FAMILIES", "REFUSED", "SOFT_CAP_FIELD", "Family"]
