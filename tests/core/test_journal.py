"""The journal returns exactly the changes since a revision, or says that some are discarded."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.readers import Clock
from tidings import Catalog, Change, Feature, Journal, Operation, Policy
from tidings.core.journal import net_changes

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS


def filled(policy: Policy, clock: Clock) -> tuple[Catalog, Journal]:
    catalog = Catalog(policy, clock=clock)
    journal = Journal(policy)
    catalog.follow(journal.append)
    return catalog, journal


def revisions(changes: list[Change] | None) -> list[int] | None:
    return None if changes is None else [change.revision for change in changes]


def test_since_returns_the_changes_after_a_revision_in_order(clock: Clock) -> None:
    catalog, journal = filled(Policy(), clock)
    catalog.tools.add({"name": "a"})
    catalog.resources.updated("a://b")
    catalog.prompts.add({"name": "p"})
    catalog.tools.remove("a")

    assert revisions(journal.since(0)) == [1, 2, 3, 4]
    assert revisions(journal.since(2)) == [3, 4]
    assert revisions(journal.since(4)) == []
    assert revisions(journal.since(0, TOOLS)) == [1, 4]
    assert revisions(journal.since(1, TOOLS)) == [4]
    assert revisions(journal.since(0, "a://b")) == [2]
    assert revisions(journal.since(0, "a://c")) == []


def test_journal_is_bounded_by_count_and_says_if_changes_are_discarded(clock: Clock) -> None:
    catalog, journal = filled(Policy(journal_changes=3), clock)
    for name in "abcde":
        catalog.tools.add({"name": name})

    assert len(journal) == 3
    assert revisions(journal.since(2, TOOLS)) == [3, 4, 5]
    assert journal.since(1, TOOLS) is None
    assert journal.since(1) is None


def test_many_changes_of_one_feature_do_not_displace_another(clock: Clock) -> None:
    catalog, journal = filled(Policy(journal_changes=2), clock)
    catalog.tools.add({"name": "a"})
    for number in range(50):
        catalog.prompts.add({"name": f"p{number}"})
        catalog.resources.updated(f"a://{number}")

    assert revisions(journal.since(0, TOOLS)) == [1]
    assert journal.since(0, PROMPTS) is None
    assert journal.since(0, "a://0") is None
    assert len(journal) == 5


def test_journal_is_bounded_by_age(clock: Clock) -> None:
    catalog, journal = filled(Policy(journal_age=10), clock)
    for clock.now, name in ((0, "a"), (5, "b"), (10, "c")):
        catalog.tools.add({"name": name})
    assert revisions(journal.since(0, TOOLS)) == [1, 2, 3], "ten seconds old is not older than ten seconds"

    clock.now = 10.1
    catalog.tools.add({"name": "d"})
    assert journal.since(0, TOOLS) is None
    assert revisions(journal.since(1, TOOLS)) == [2, 3, 4]

    journal.expire(now=100)
    assert len(journal) == 0
    assert journal.since(3, TOOLS) is None
    assert journal.since(4, TOOLS) == []


def test_journal_is_bounded_by_size(clock: Clock) -> None:
    catalog, journal = filled(Policy(journal_bytes=1000), clock)
    for number in range(20):
        catalog.tools.add({"name": f"{number:02}", "title": "x" * 174})  # 200 bytes of JSON
    for _ in range(20):
        catalog.resources.updated("a://b", note="x" * 239)

    assert [change.key for change in journal.since((catalog.version(TOOLS)).revision - 5, TOOLS) or ()] == [
        *("15", "16", "17", "18", "19")
    ]
    assert journal.since(catalog.version(TOOLS).revision - 6, TOOLS) is None
    assert len(journal.contents_since(catalog.revision - 4) or ()) == 4
    assert journal.contents_since(catalog.revision - 5) is None
    for number in range(20):
        catalog.tools.remove(f"{number:02}")
    assert len(journal.since(catalog.revision - 5, TOOLS) or ()) == 5, "removed items count too"
    assert journal.since(catalog.revision - 6, TOOLS) is None


def test_journal_is_restored_with_its_floors(clock: Clock) -> None:
    catalog, journal = filled(Policy(journal_changes=3), clock)
    for name in "abcde":
        catalog.tools.add({"name": name})
    restored = Journal(Policy(journal_changes=2))
    restored.restore(journal.since(2, TOOLS) or [], journal.floors())

    assert journal.floors() == {TOOLS: 2, PROMPTS: 0, Feature.RESOURCES: 0, None: 0}
    assert revisions(restored.since(3, TOOLS)) == [4, 5], "as far as the policy still allows"
    assert restored.since(2, TOOLS) is None
    assert restored.since(0, PROMPTS) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "1", "2"])), max_size=12))
def test_net_changes_lead_from_the_first_state_to_the_last(
    steps: list[tuple[str, str | None]],
) -> None:
    catalog = Catalog()
    catalog.tools.add({"name": "a", "title": "1"})
    before = {item.key: item.json for item in catalog.tools.snapshot()}
    changes: list[Change] = []
    catalog.follow(changes.extend)
    for name, title in steps:
        if title is not None:
            catalog.tools.add({"name": name, "title": title}, replace=True)
        elif name in catalog.tools:
            catalog.tools.remove(name)

    seen = net_changes(changes)

    state = dict(before)
    for change in seen:
        assert state.get(change.key) == (change.before.json if change.before else None)
        if change.item is None:
            assert change.operation is Operation.REMOVED
            del state[change.key]
        else:
            assert change.operation is (Operation.UPDATED if change.key in state else Operation.ADDED)
            assert state.get(change.key) != change.item.json
            state[change.key] = change.item.json
    assert state == {item.key: item.json for item in catalog.tools.snapshot()}
    assert len({change.key for change in seen}) == len(seen)
    assert [change.revision for change in seen] == sorted(change.revision for change in seen)


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(0, 8))
def test_changes_of_one_content_equal_those_among_all(uris: list[str], most: int) -> None:
    catalog = Catalog()
    journal = Journal(Policy(journal_changes=most))
    catalog.follow(journal.append)
    for uri in uris:
        catalog.resources.updated(uri)
        kept, _ = journal.kept_since(-1)
        for each in "abc":
            for revision in (-1, kept[0].revision if kept else 0, catalog.revision - 1):
                expected = [change for change in kept if change.topic == each and change.revision > revision]
                assert journal.kept_since(revision, each)[0] == expected
    indexed = journal._contents._by_uri.values()
    assert sum(map(len, indexed)) <= 2 * (most + 3), "discarded changes are released"
