"""A class attribute is replaced for as long as somebody needs it."""

import pytest

from nano_loop.intercept.attributes import replaced


class Base:
    def greet(self):
        return "base"


class Child(Base):
    pass


def louder(original):
    return lambda self: original(self).upper()


def test_own_attribute_is_replaced_and_put_back():
    own = vars(Base)["greet"]
    with replaced(Base, "greet", louder):
        assert Base().greet() == "BASE"
        assert Child().greet() == "BASE"
    assert vars(Base)["greet"] is own


def test_inherited_attribute_is_inherited_again_afterwards():
    with replaced(Child, "greet", louder):
        assert Child().greet() == "BASE"
        assert Base().greet() == "base"
    assert "greet" not in vars(Child)


def test_attribute_stays_replaced_until_the_last_one_leaves():
    first, second = replaced(Base, "greet", louder), replaced(Base, "greet", louder)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Base().greet() == "BASE"
    second.__exit__(None, None, None)
    assert Base().greet() == "base"


def test_attribute_is_put_back_after_an_exception():
    with pytest.raises(ZeroDivisionError), replaced(Base, "greet", louder):
        raise ZeroDivisionError
    assert Base().greet() == "base"


def test_somebody_elses_later_replacement_is_left_alone(monkeypatch):
    with replaced(Base, "greet", louder):
        monkeypatch.setattr(Base, "greet", lambda self: "theirs")
    assert Base().greet() == "theirs"


def test_a_static_method_is_put_back_as_one():
    class Holder:
        @staticmethod
        def number():
            return 1

    with replaced(Holder, "number", lambda original: staticmethod(lambda: original() + 1)):
        assert Holder.number() == 2
    assert isinstance(vars(Holder)["number"], staticmethod)
