"""Thirty answers as users of pydantic describe them."""

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, StringConstraints

T = TypeVar("T")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Capital(BaseModel):
    city: str
    is_capital: bool
    people: int


class Described(BaseModel):
    """The answer's description is part of its schema."""

    title: str = Field(description="A title", examples=["Dune"], max_length=40)
    year: int = Field(ge=1800, le=2100)


class Nullable(BaseModel):
    name: str | None
    age: int | None = None


class Defaults(BaseModel):
    unit: str = "celsius"
    tags: list[str] = []


class Enums(BaseModel):
    color: Color
    level: Level


class Choice(BaseModel):
    answer: Literal["yes", "no", "maybe"]
    stars: Literal[1, 2, 3]


class Step(BaseModel):
    explanation: str
    output: str


class MathReasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Event(BaseModel):
    name: str
    day: date
    participants: list[str]


class Moments(BaseModel):
    at: datetime
    daily: time
    lasts: timedelta


class Identified(BaseModel):
    id: UUID
    address: IPv4Address


class Linked(BaseModel):
    url: AnyUrl


class Priced(BaseModel):
    price: Decimal
    discount: float = Field(ge=0, lt=1)


class Coded(BaseModel):
    code: Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}-\d{3}$")]
    short: Annotated[str, StringConstraints(min_length=2, max_length=4, pattern="^[a-z]+$")]


class Stepped(BaseModel):
    minutes: int = Field(multiple_of=5, ge=0, le=60)


class Pair(BaseModel):
    point: tuple[float, float]
    labelled: tuple[int, str]


class Bounded(BaseModel):
    scores: list[Annotated[int, Field(ge=0, le=10)]] = Field(min_length=1, max_length=3)


class Palette(BaseModel):
    colors: set[Color]


class Counts(BaseModel):
    by_word: dict[str, int]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", title="Closed answer")
    name: str


class Aliased(BaseModel):
    first_name: str = Field(alias="firstName")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    breed: str


class Tagged(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Untagged(BaseModel):
    pet: Cat | Dog
    value: int | str | list[int]


class Tree(BaseModel):
    name: str
    children: list["Tree"]


class Linked2(BaseModel):
    value: int
    next: "Linked2 | None"


class Page(BaseModel, Generic[T]):
    items: list[T]
    total: int


class Address(BaseModel):
    street: str
    zip_code: str = Field(pattern=r"^\d{5}$")


class Person(BaseModel):
    name: str
    home: Address
    work: Address | None = Field(default=None, description="Where they work")


class Ui(BaseModel):
    type: Literal["div", "button", "field"]
    label: str
    children: list["Ui"]
    attributes: list[tuple[str, str]]


class Matrix(BaseModel):
    rows: list[list[int]]


class Quoted(BaseModel):
    text: str = Field(pattern=r'^"[^"\\]*"$')


class Anything(BaseModel):
    value: Any
    nothing: None


class Extracted(BaseModel):
    people: list[Person]
    places: list[Capital]
    mood: Color | None


MODELS: list[type[BaseModel]] = [
    *(Capital, Described, Nullable, Defaults, Enums, Choice, MathReasoning, Event, Moments),
    *(Identified, Linked, Priced, Coded, Stepped, Pair, Bounded, Palette, Counts, Open, Closed),
    *(Aliased, Tagged, Untagged, Tree, Linked2, Page[Capital], Person, Ui, Matrix, Quoted),
    *(Anything, Extracted),
]
