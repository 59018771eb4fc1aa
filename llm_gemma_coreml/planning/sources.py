"""From the name that a user gives to the shape of a model: an installed bundle, an entry of the catalogue, a random model."""

from __future__ import annotations

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.store import list_bundles
from llm_gemma_coreml.errors import BundleError, SourceError
from llm_gemma_coreml.planning.shapes import ASSISTANT_BYTES, PUBLISHED, ModelShape, shape_of_bundle, shape_of_config

DEFAULT_RUNGS = (4096, 32768, 131072)
_DRAFTED = "gemma-4-12b"


def find_shape(name: str, rungs: tuple[int, ...] | None = None, bits: int | None = None) -> ModelShape:
    """The shape of that model. rungs, bits: what `convert` is to be given; they do not change an installed bundle.

    Raises BundleError with the names that can be planned for.
    """
    plain = name.removeprefix(catalog.MODEL_PREFIX)
    plain = catalog.alias_meanings().get(plain, plain)
    bundle = next((bundle for bundle in list_bundles() if bundle.name == plain), None)
    if bundle is not None:
        return shape_of_bundle(bundle.path)
    if plain == PUBLISHED.name:
        return PUBLISHED
    from llm_gemma_coreml.convert.random_models import random_config

    base = _configuration(plain)
    try:
        config = random_config(base)
    except SourceError as error:
        raise BundleError(f"There is no bundle and no known model {name!r}. Known: {', '.join(plannable())}.") from error
    drafter = ASSISTANT_BYTES if base == _DRAFTED else None
    return shape_of_config(config, plain, rungs or DEFAULT_RUNGS, bits, drafter)


def published_model_in_our_layout() -> ModelShape:
    """What `convert` makes of the model that the published bundle holds."""
    from llm_gemma_coreml.convert.random_models import random_config

    return shape_of_config(random_config(_DRAFTED), _DRAFTED, DEFAULT_RUNGS, drafter_bytes=ASSISTANT_BYTES)


def _configuration(name: str) -> str:
    """The name of the configuration: that of the catalogue without what makes it a checkpoint of it."""
    for ending in ("-it", "-base", "-pt"):
        name = name.removesuffix(ending)
    return name.replace("gemma3-", "gemma-3-").replace("gemma4-", "gemma-4-")


def plannable() -> list[str]:
    """All names that `find_shape` knows, sorted."""
    from llm_gemma_coreml.convert.random_models import RANDOM_MODELS

    installed = {bundle.name for bundle in list_bundles()}
    return sorted(installed | set(RANDOM_MODELS) | {PUBLISHED.name})
