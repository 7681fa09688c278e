"""A class attribute is replaced for as long as it has users."""

import threading

from nano_loop.patching.attributes import replaced, suspended


class Base:
    def greet(self):
        return "base"


class Child(Base):
    pass


def louder(original):
    return lambda self: original(self).upper()


def test_inherited_attribute_is_inherited_again_afterwards():
    with replaced(Child, "greet", louder):
        assert Child().greet() == "BASE"
        assert Base().greet() == "base"
    assert "greet" not in vars(Child)


def test_somebody_elses_later_replacement_is_left_alone():
    class Patched(Base):
        pass

    with replaced(Patched, "greet", louder):
        Patched.greet = lambda self: "theirs"
    assert Patched().greet() == "theirs"


class Other(Base):
    def greet(self):
        return "other"


def test_what_is_suspended_comes_back_unless_its_last_user_has_gone():
    own = vars(Other)["greet"]
    made = replaced(Other, "greet", louder)
    made.__enter__()
    with suspended(Other):
        assert Other().greet() == "other"
    assert Other().greet() == "OTHER"
    with suspended(Other):
        made.__exit__(None, None, None)
    assert vars(Other)["greet"] is own


def test_exports_in_several_threads_wait_for_each_other():
    order = []
    inside, go_on = threading.Event(), threading.Event()

    def first():
        with suspended(Other):
            inside.set()
            go_on.wait()
            order.append("first")

    def second():
        with suspended(Other):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "second"]
