"""A policy decides by size which products round, and learns the smallest of these sizes."""

import pytest
import torch

from nano_loop.policy.product_precision import ATTENTION, MIN_MULTIPLICATIONS, PRODUCT, Policy, is_large


@pytest.fixture
def noted():
    return []


@pytest.fixture
def policy(noted):
    return Policy(torch.bfloat16, lambda *product: noted.append(product))


def least(kind=PRODUCT):
    return MIN_MULTIPLICATIONS[kind] * torch.get_num_threads()


def test_products_of_three_quarters_of_the_bound_are_asked_about_and_those_of_the_bound_are_large(policy):
    assert [policy.may_round(PRODUCT, share * least() // 4) for share in (2, 3, 4)] == [False, True, True]
    assert [is_large(PRODUCT, share * least() // 4) for share in (3, 4)] == [False, True]


def test_what_is_smaller_than_all_that_has_rounded_is_asked_about_no_more(policy, noted):
    policy.note(PRODUCT, 8 * least(), 5)
    policy.watch()
    for times in (3, 2):
        policy.note(PRODUCT, times * least(), 0)
    cost = policy.learn()
    assert cost > 0
    assert [policy.may_round(PRODUCT, times * least()) for times in (1, 2, 3)] == [False, True, True]
    assert [policy.may_any_round(kind) for kind in (PRODUCT, ATTENTION)] == [True, False]
    assert policy.has_rounded
    assert noted[0] == (torch.bfloat16, PRODUCT, 5)
    policy.forget()
    assert policy.may_round(PRODUCT, least())
    assert policy.may_any_round(ATTENTION)


def test_nothing_rounds_while_a_policy_is_paused_and_after_its_end(policy):
    policy.is_paused = True
    assert not policy.may_round(PRODUCT, 100 * least())
    assert policy.may_any_round(PRODUCT)
    policy.is_paused = False
    assert policy.may_round(PRODUCT, 100 * least())
    policy.end()
    assert not policy.may_round(PRODUCT, 100 * least())
    assert not policy.may_any_round(PRODUCT)
