"""The examples run, and show what they say they show."""

import pytest

from examples import ppo_cartpole, truncation


def test_only_the_bootstrap_from_next_observation_finds_the_true_value():
    found = truncation.main()

    assert found["right"] == pytest.approx(found["truth"], abs=1e-3)
    # Solved by hand: of 5 steps at the wall one is cut, and loses all that follows or goes on from the start.
    assert found["as_terminated"] == pytest.approx(0.9**5 / (1 - 0.9 * 4 / 5), abs=1e-3)
    assert found["from_reset"] == pytest.approx(0.9**5 / (1 - 0.9 * 4 / 5 - 0.9 / 5 * 0.9**5), abs=1e-3)


@pytest.mark.slow
def test_ppo_learns_from_20_thousand_frames(capsys):
    score = ppo_cartpole.main(["--seed", "1", "--total-frames", "20480", "--eval-episodes", "10"])

    assert score > 150  # uniform random actions: 22
    assert "20,480 frames" in capsys.readouterr().out
