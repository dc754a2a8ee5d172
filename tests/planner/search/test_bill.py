"""Days and money of a training: counted by hand."""

import pytest

from megatron.planner.search.outcome import Budget, amount, money

GIVEN = {"num_gpus": 16, "sequence_length": 1000}


def test_a_bill():
    """A billion tokens in batches of 64,000 are 15,625 iterations; of 9 s on 16 GPUs each is 0.04 GPU hours."""
    bill = Budget(**GIVEN, tokens=1e9, price_per_gpu_hour=2.5, currency="EUR").bill(seconds=9.0, sequences=64)
    assert bill.gpu_hours_per_iteration == pytest.approx(0.04) and bill.num_iterations == 15_625
    assert bill.gpu_hours == pytest.approx(625.0) and bill.days == pytest.approx(625 / 16 / 24)
    assert bill.cost == pytest.approx(1562.5) and bill.cost_per_iteration == pytest.approx(0.1)
    assert bill.cost_per_million_tokens == pytest.approx(1.5625) and bill.currency == "EUR"
    one_more = Budget(**GIVEN, tokens=1e9 + 1).bill(seconds=9.0, sequences=64)
    assert one_more.num_iterations == 15_626  # the last batch is whole


def test_what_is_not_known_is_none():
    """Without a price no money, without tokens no days."""
    hours = Budget(**GIVEN, tokens=1e9).bill(seconds=9.0, sequences=64)
    assert hours.days and hours.gpu_hours
    assert hours.cost is hours.cost_per_million_tokens is hours.cost_per_iteration is hours.currency is None
    million = Budget(**GIVEN, price_per_gpu_hour=2.5).bill(seconds=9.0, sequences=64)
    assert million.cost_per_million_tokens == pytest.approx(1.5625) and million.currency == "USD"
    assert million.days is million.gpu_hours is million.cost is million.num_iterations is None


def test_amounts_in_words():
    assert (amount(99.96), amount(100.4), amount(0.12345)) == ("100", "100", "0.123")
    assert money(1234567.8, "USD") == "1,234,568 USD" and money(3.1234, "EUR") == "3.12 EUR"
