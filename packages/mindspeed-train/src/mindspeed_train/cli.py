"""The command line of the Megatron trainer."""

from mindspeed_runtime.cli import command_group, run

COMMANDS = {
    "run": ("mindspeed_train.commands:run_command", "Train as a recipe says."),
    "quickstart": ("mindspeed_train.commands:quickstart_command", "Fine-tune a small real model, end to end."),
    "plan": ("mindspeed_models.cli:plan_command", "What a recipe takes on every rank, before anything is started."),
    "models": ("mindspeed_models.cli:models_command", "List the named models of the catalog."),
    "recipe": ("mindspeed_models.cli:recipe_command", "Write a complete recipe for a named model."),
    "prove": ("mindspeed_train.commands:prove_group", "Prove a recipe's layout or resume on this machine."),
    "features": (
        "mindspeed_train.commands:features_command",
        "List features, and the patches that a recipe activates.",
    ),
}
GROUP = command_group(
    "mindspeed-train", "mindspeed-train", "Train language models with megatron-core on NPU, CUDA and CPU.", COMMANDS
)


def main() -> None:
    """Entry point."""
    run(GROUP)
