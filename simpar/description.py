"""The form of every description (model, cluster, plan, job): frozen, keyword-only, checked once, varied by copy."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from simpar.errors import nearest


class Description(BaseModel):
    """A frozen pydantic model whose unknown keys are errors that name the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [*cls.model_fields, *(f.alias for f in cls.model_fields.values() if f.alias)]
            for key in data:
                if key not in known:
                    raise ValueError(f"unknown key '{key}'{nearest(str(key), known)} (known: {', '.join(known)})")
        return data

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**dict(self), **changes})
