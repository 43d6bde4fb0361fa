"""The form of every description (model, cluster, plan, job): frozen, keyword-only, checked once, varied by copy."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from simpar.errors import SimparError, nearest

_MOST_BITS = 63  # nothing that is counted here comes near; larger numbers overflow where costs are floats
_MOST_KNOWN = 20  # fields that a message lists


class Description(BaseModel):
    """A frozen pydantic model whose mistakes are errors of simpar's own family.

    Building one (by keywords, ``model_validate``, ``model_validate_json`` or ``replace``) raises ``error_type`` with
    one line per wrong field, ``plan.tp: 0 should be greater than or equal to 1``; pydantic's own error is its
    ``__context__``. Unknown keys are errors that name the nearest known one; ``true`` and ``false`` are no numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, allow_inf_nan=False)

    error_type: ClassVar[type[SimparError]] = SimparError

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            self._raise(error)

    # Says that nested descriptions can be built without a call of __init__: pydantic then collects all their errors.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """The description that a mapping (or another object that the class understands) stands for.

        Raises:
            SimparError: a field is wrong.
        """
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            cls._raise(error)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **how: Any) -> Self:
        """The description that a JSON text stands for.

        Raises:
            SimparError: a field is wrong, or the text is no JSON.
        """
        try:
            return super().model_validate_json(json_data, **how)
        except ValidationError as error:
            cls._raise(error)

    if not TYPE_CHECKING:  # type checkers know frozen fields, and would let anything be set where this is defined

        def __setattr__(self, name: str, value: object) -> None:
            if name in type(self).model_fields:
                raise self.error_type(
                    f"{name}: a {type(self).__name__} is frozen; make another one with .replace({name}=…)"
                )
            super().__setattr__(name, value)

    @classmethod
    def _raise(cls, error: ValidationError) -> NoReturn:
        from simpar.problems import problems  # noqa: PLC0415 - only on the way to an error

        raise cls.error_type.of_fields(problems(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [*cls.model_fields, *(f.alias for f in cls.model_fields.values() if f.alias)]
            wrong = [_unknown(key, known, data) for key in data if key not in known]
            if wrong:
                raise ValidationError.from_exception_data(cls.__name__, wrong)
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_odd_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise PydanticKnownError("int_parsing_size")
        # Python counts true as 1, so `tp: true` would pass for `tp: 1`
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(each is True or each is False for each in inner):
            types = _leaves(cls.model_fields[info.field_name or ""].annotation)
            if types & {int, float} and bool not in types:
                if isinstance(value, bool):
                    raise PydanticKnownError("int_type" if int in types else "float_type")
                raise ValueError("holds true or false where numbers belong; give the numbers")
        return value

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**dict(self), **changes})


def _unknown(key: object, known: list[str], data: Any) -> InitErrorDetails:
    # Where one is near, the list of all of them only hides it.
    listed = [*known[:_MOST_KNOWN], f"and {len(known) - _MOST_KNOWN} more"] if len(known) > _MOST_KNOWN else known
    hint = nearest(str(key), known) or f" (known: {', '.join(listed)})"
    problem = PydanticCustomError("unknown_key", "unknown key '{key}'{hint}", {"key": str(key), "hint": hint})
    return InitErrorDetails(type=problem, loc=(), input=data)


def _leaves(annotation: Any) -> set[Any]:
    """The types at the ends of an annotation: of ``tuple[int, ...] | None`` these are ``int`` and ``None``'s."""
    inner, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return {type(value) for value in inner}
    if origin is Annotated:
        inner = inner[:1]
    return set().union(*(_leaves(each) for each in inner)) if inner else {annotation}
