"""Parameters that tests draw by NumPy are like those that training starts from: the same arrays for
every kind of sublayer, and the same values for those that begin constant, and no others."""

import jax
import numpy as np
import pytest
from parameters import params_of
from test_step_experts import MIXTRAL
from test_step_families import BERT, LLAMA
from test_step_llava import LLAVA
from test_step_retro import RETRO
from test_step_t5 import T5
from test_step_woven import DEEPSEEK, GPT

import mtx


@pytest.mark.parametrize(
    "model",
    [GPT, LLAMA, BERT, MIXTRAL, DEEPSEEK, T5, LLAVA, RETRO],
    ids=lambda model: model.family,
)
def test_they_are_like_the_first_of_a_training(model):
    drawn, first = params_of(model), mtx.init_params(model)
    assert jax.tree.structure(drawn) == jax.tree.structure(first)

    def check(a, b):
        assert a.shape == b.shape and a.dtype == b.dtype
        if np.ptp(a) == 0:
            np.testing.assert_array_equal(a, b)
        else:
            assert b.std() / 20 < a.std() < 20 * b.std()

    jax.tree.map(check, drawn, first)
