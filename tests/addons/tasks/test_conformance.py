"""What every task must keep, checked for each task of addons/tasks/ as tests/conformance/test_task.py does for src/."""

import pytest

from engine.config.find_addons import addon_names
from tests.addons.tasks import recipes
from tests.conformance.test_task import (  # noqa: F401 (pytest runs them here, too, with the recipes below)
    make_flags,
    opened,
    test_batches_repeat_and_sums_add_up,
    test_evaluation_is_a_function_of_the_rows,
    test_evaluation_on_three_processes_equals_that_of_training,
    test_exact_sums_are_bitwise_the_same_on_any_number_of_processes,
    test_interrupted_run_resumes_bitwise,
    test_loss_is_a_sum_over_independent_rows,
    test_mutant_another_run_is_another,
    test_numbers_do_not_depend_on_the_split,
    test_shortened_rows_have_fewer_tokens,
    whole,
)

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module", params=recipes.RECIPES, ids=lambda recipe: recipe.__name__)
def flags(request, tmp_path_factory):
    return make_flags(request.param, tmp_path_factory.mktemp(request.param.__name__))


def tasks_without_recipe() -> set[str]:
    return set(addon_names("tasks")) - {recipe.__name__ for recipe in recipes.RECIPES}


def test_every_task_has_a_recipe():
    """A copy may add a task first. In the template, tests/project/test_pages.py demands it."""
    if missing := tasks_without_recipe():
        pytest.skip(f"not checked, because tests/addons/tasks/recipes.py has no recipe: {', '.join(sorted(missing))}")
