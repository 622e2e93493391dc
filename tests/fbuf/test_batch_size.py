"""A batch size of the buffer: draws need none, so nothing is static under `pmap`."""

import jax
import jax.numpy as jnp
import pytest

from fbuf import Buffer, Mixture, Prioritized, Sharded, Slices, Trajectories

KEY = jax.random.key(0)


def test_draws_without_a_batch_size_have_that_of_the_buffer() -> None:
    buffer = Buffer(10, Prioritized(), batch_size=4)
    state, _ = buffer.extend(buffer.init(jnp.zeros(())), jnp.arange(6.0))
    assert buffer.sample(state, KEY)[1].shape == (4,)
    assert buffer.sample(state, KEY, 3)[1].shape == (3,)
    mixture = Mixture((buffer, buffer), batch_size=6)
    assert mixture.sample((state, state), KEY)[1].shape == (6,)
    on_mesh = Sharded(buffer).over(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    )
    state, slots = on_mesh.extend(on_mesh.init(jnp.zeros(())), jnp.arange(6.0), jnp.arange(6) % 2 == 0)
    assert slots.tolist() == [0, -1, 1, -1, 2, -1]
    assert on_mesh.size(state) == 3
    items = on_mesh.sample(state, KEY)[1]
    assert items.shape == (4,) and {*items.tolist()} <= {0.0, 2.0, 4.0}


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
def test_pmap_needs_no_static_arguments() -> None:
    buffer = Buffer(10, batch_size=4)
    states = jax.tree.map(lambda leaf: leaf[None], buffer.extend(buffer.init(jnp.zeros(())), jnp.arange(6.0))[0])
    assert jax.pmap(buffer.sample, devices=jax.devices()[:1])(states, KEY[None])[1].shape == (1, 4)


def test_without_any_and_with_a_wrong_one_it_says_so() -> None:
    buffer = Buffer(10)
    with pytest.raises(TypeError, match=r"sample\(\) needs a batch size: sample\(state, key, 32\), or Buffer"):
        buffer.sample(buffer.init(jnp.zeros(())), KEY)
    with pytest.raises(ValueError, match="batch_size=5 is not a multiple of the slice length, 2"):
        Buffer(10, Slices(2), trajectories=Trajectories(endless=True), batch_size=5)
    with pytest.raises(ValueError, match="batch_size=5 is not a multiple of the slice length, 2"):
        Mixture((Buffer(10, Slices(2), trajectories=Trajectories(endless=True)),), batch_size=5)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        Buffer(10, batch_size=0)
