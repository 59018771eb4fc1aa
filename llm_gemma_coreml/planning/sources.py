"""From the name that a user gives to the shape of a model: an installed bundle, an entry of the catalogue, a random model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.store import list_bundles
from llm_gemma_coreml.errors import BundleError, SourceError
from llm_gemma_coreml.planning.shapes import ASSISTANT_BYTES, PUBLISHED, ModelShape, shape_of_bundle, shape_of_config

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.build import BuildOptions

_DRAFTED = "gemma-4-12b"


def find_shape(
    name: str, rungs: tuple[int, ...] | None = None, bits: int | None = None, target: str = "mac"
) -> ModelShape:
    """The shape of that model. rungs, bits, target: what `convert` is to be given; they do not change an installed bundle.

    Raises BundleError with the names that can be planned for, RequestError for what `convert` refuses.
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
    return shape_of_config(config, plain, _options(rungs, bits, target), drafter)


def published_model_in_our_layout() -> ModelShape:
    """What `convert` makes of the model that the published bundle holds."""
    from llm_gemma_coreml.convert.random_models import random_config

    return shape_of_config(random_config(_DRAFTED), _DRAFTED, _options(), ASSISTANT_BYTES)


def _options(rungs: tuple[int, ...] | None = None, bits: int | None = None, target: str = "mac") -> BuildOptions:
    from llm_gemma_coreml.convert.build import BuildOptions
    from llm_gemma_coreml.convert.target import DEFAULT_CONTEXTS

    return BuildOptions(bits=bits, contexts=rungs or DEFAULT_CONTEXTS, target=target)


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
