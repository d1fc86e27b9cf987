"""The router's groups of experts: a token chooses from the few groups whose two best experts are best together."""

from pallas_kernels.contract import Rule
from pallas_kernels.simt.language import indices, loop, warp_barrier
from pallas_kernels.simt.router_keys import MINUS_INFINITY, NOTHING, key_of, value_of
from pallas_kernels.simt.router_lanes import Lane
from pallas_kernels.simt.values import maximum, minimum, select


def keep_best_groups(lane: Lane, keys: list, rule: Rule, ranks, group_scores) -> list:
    """`keys`, with that of -inf outside the row's best groups. A group is worked on by one lane.

    `ranks` and `group_scores` are shared memory, a word for each expert (padding included) and each group of every row.
    """
    layout, num_groups = lane.layout, rule.num_groups
    per_group = layout.num_experts // num_groups
    ranks = ranks.at(lane.row_of_block * (layout.lanes * layout.per_lane))
    group_scores = group_scores.at(lane.row_of_block * num_groups)
    mine = ranks.at(lane.first_expert)
    for i, key in enumerate(keys):
        mine[i] = key
    warp_barrier()
    for group in indices(lane.of_row, num_groups, layout.lanes):
        group_scores[group] = _score(ranks.at(group * per_group), group, per_group)
    warp_barrier()
    for group in indices(lane.of_row, num_groups, layout.lanes):
        excluded = _better_groups(group_scores, group, num_groups) >= rule.groups_per_token
        members = ranks.at(group * per_group)
        for i in indices(0, select(excluded, per_group, 0), 1):
            members[i] = MINUS_INFINITY
    warp_barrier()
    keys = [mine[i] for i in range(len(keys))]
    warp_barrier()
    return keys


def _score(members, group, per_group: int):
    """Key of the sum of the group's two best; one that is ruled out counts for nothing."""

    def look(i, best, second):
        turned = i + group % per_group  # lanes that read in step then read different banks
        key = members[select(turned < per_group, turned, turned - per_group)]
        return [maximum(best, key), maximum(second, minimum(best, key))]

    best, second = loop(0, per_group, 1, look, [NOTHING, NOTHING])
    both = key_of(value_of(best) + value_of(second))
    return select(second > MINUS_INFINITY, both, best)


def _better_groups(group_scores, group, num_groups: int):
    """How many groups go before this one."""
    score = group_scores[group]

    def compare(other, better):
        another = group_scores[other]
        ahead = (another > score) | (another.equals(score) & (other < group))
        return [better + select(ahead, 1, 0)]

    (better,) = loop(0, num_groups, 1, compare, [0])
    return better
