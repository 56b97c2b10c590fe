"""What stands in a grant."""

from tests.cluster.control.factory import grants
from tests.cluster.control.story import Story


def test_nobody_can_guess_the_name_of_a_handoff():
    """S-13: two clusters in the same state, asked the same, name it differently."""
    names = [grant.handoff_id for _ in range(2) for grant in grants(Story().want())]
    assert len(names) == len(set(names)) == 2
    secret = [name.rsplit("-", 1)[1] for name in names]
    assert all(len(bytes.fromhex(each)) >= 8 for each in secret)


def test_a_want_that_comes_again_gets_the_same_handoff():
    story = Story()
    (first,), (again,) = grants(story.want()), grants(story.want())
    assert first == again
