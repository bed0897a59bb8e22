"""Observers of a training as one: each is called in the moments that it watches, in order."""

from scaleray.training.observer import Observer, Observers


def test_an_observer_is_called_in_the_moments_it_has_a_method_for_and_in_no_other():
    called = []

    class Every(Observer):
        def during_step(self, number):
            called.append(("during", number))

        def after_launch(self):
            called.append("launched")

        def after_step(self, taken):
            called.append(("after", taken))

    class Inherits(Every):
        pass

    idle, replaced = Observer(), Observer()
    replaced.after_launch = lambda: called.append("replaced")
    observers = Observers(idle, Every(), replaced, Inherits())
    with observers.during_step(7):
        called.append("step")
    observers.after_launch()
    observers.after_step("taken")
    assert called == [
        ("during", 7), ("during", 7), "step", "launched", "replaced", "launched", ("after", "taken"), ("after", "taken"),
    ]  # fmt: skip
    idle.after_launch = idle.after_step = idle.during_step = None  # not called: calling None would raise
    observers.after_launch()
    observers.after_step("taken")
    with observers.during_step(8):
        assert called[-1] == ("during", 8)
