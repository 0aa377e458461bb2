"""gqa_attn under the signatures of other libraries: change the import, keep the calls."""

from torch import Tensor

from .. import _rules


def refuse(**options) -> None:
    """Raises where one of these options, which gqa_attn does not have, is given: neither None nor False nor 0."""
    given = ", ".join(f"{name} ({type(option).__name__})" if isinstance(option, Tensor) else f"{name}={option}"
                      for name, option in options.items() if isinstance(option, Tensor) or option)
    if given:
        raise _rules.UnsupportedError(f"gqa_attn does not support {given}: leave it out")
