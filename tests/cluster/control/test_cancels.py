"""A cancel's question is answered exactly once."""

from cluster.control.cancels import Answer, CancelDesk


def answer(was_running):
    return Answer(router_id="a", cancel_id=9, was_running=was_running)


def test_nobody_to_ask_is_an_answer():
    assert CancelDesk(1.0).ask("a", 9, [], 0.0) == answer(False)


def test_the_first_yes_answers_and_later_words_do_not():
    desk = CancelDesk(1.0)
    desk_id = desk.ask("a", 9, ["b", "c"], 0.0)
    assert desk.answered("b", desk_id, True) == [answer(True)]
    assert desk.answered("c", desk_id, True) == []
    assert desk.tick(5.0) == []


def test_the_last_no_answers_and_a_router_speaks_once():
    desk = CancelDesk(1.0)
    desk_id = desk.ask("a", 9, ["b", "c"], 0.0)
    assert desk.answered("b", desk_id, False) == []
    assert desk.answered("b", desk_id, True) == []
    assert desk.answered("stranger", desk_id, True) == []
    assert desk.answered("c", desk_id, False) == [answer(False)]


def test_a_lost_router_counts_as_no_and_a_lost_asker_is_not_answered():
    desk = CancelDesk(1.0)
    desk.ask("a", 9, ["b"], 0.0)
    desk.ask("b", 1, ["a"], 0.0)
    assert desk.router_gone("b") == [answer(False)]
    assert desk.tick(5.0) == []


def test_time_answers():
    desk = CancelDesk(1.0)
    desk.ask("a", 9, ["b"], 0.0)
    assert desk.tick(0.5) == []
    assert desk.tick(1.0) == [answer(False)]
