"""Parameters of policies: by name, as they are written, and what a policy chose itself."""

from __future__ import annotations

import pytest
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import LayerType
from overspill.core.errors import RequestError
from overspill.plans.comparison import compare
from overspill.plans.plan import unmanaged_peak
from overspill.policies import policies_in, policy_named

NETWORK = network([Layer(65536, LayerType.CONV, flops=10**8, weight_bytes=4096) for _ in range(6)], 65536)


def test_a_name_with_parameters_is_read_and_written_the_same() -> None:
    for text in (
        "window:window=1048576,every_step,m",
        "lms:threshold=4,ahead=0",
        "vdnn-all:pooling_searches=no",
        "auto",
    ):
        assert str(policy_named(text)) == text
    assert str(policy_named("window:window=1MiB,every_step=no")) == "window:window=1048576"
    assert str(policy_named("window:window=0")) == "window:window=0"
    given = policy_named("vdnn-all:m")
    assert policy_named(given) is given


def test_in_a_list_parameters_belong_to_the_policy_before_them() -> None:
    assert policies_in("window:window=1GiB,every_step,window,auto,lms:ahead=4,threshold=2,vdnn-all:m,auto") == (
        "window:window=1GiB,every_step", "window", "auto", "lms:ahead=4,threshold=2", "vdnn-all:m",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("window:every", "the policy window has no parameter 'every'; did you mean 'every_step'"),
        ("window:window", "needs a value of window: window:window=…"),
        ("lms:ahead=two", "ahead='two' is no whole number"),
        ("lms:ahead=٢", "ahead='٢' is no whole number"),
        ("window:every_step=perhaps", "every_step='perhaps' is neither yes nor no"),
        ("vdnn-dynamic:pass=cnv", "unknown pass 'cnv'; did you mean 'conv'"),
        ("virtual-addressing", "placement=chunked simulates it"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_said(text: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        policy_named(text)
    assert said in str(caught.value)


def test_a_row_says_which_pass_and_which_window_were_chosen_and_these_give_the_same_plan() -> None:
    budget = int(0.8 * unmanaged_peak(NETWORK, DEVICE))
    for row in compare(NETWORK, DEVICE, ("vdnn-dynamic", "window", policy_named("lms")), budget):
        assert row.plan is not None
        assert row.chosen
        (again,) = compare(NETWORK, DEVICE, (row.plan.schedule.policy,), budget)
        assert again.plan is not None
        assert again.plan.schedule == row.plan.schedule
        assert not again.chosen
