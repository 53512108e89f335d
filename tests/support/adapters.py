"""Fill the LoRA adapters of a model with non-zero values."""

from typing import Any

import jax
import numpy as np

from nnxmoe.convert.peft.adapter_slots import adapted_slots


def fill(model: Any) -> Any:
    """Fill every ``b``, which starts as 0. A layer's values do not depend on stacking or mesh."""
    for slot in adapted_slots(model):
        b = slot.adapter.b
        whole = np.array(b.get_value())
        for i in range(slot.depth or 1):
            rng = np.random.default_rng([slot.first + i, *map(ord, slot.name)])
            at = slice(None) if slot.depth is None else i
            whole[at] = 0.2 * rng.standard_normal(b.shape[slot.depth is not None :])
        b.set_value(jax.device_put(whole, b.get_value().sharding))
    return model
