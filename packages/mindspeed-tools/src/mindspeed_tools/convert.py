"""The command line of conversion."""

from mindspeed_runtime.cli import command_group, run

COMMANDS = {
    "to-megatron": (
        "mindspeed_tools.commands:to_megatron_command",
        "Hugging Face folder or GGUF file to a checkpoint.",
    ),
    "to-hf": ("mindspeed_tools.commands:to_hf_command", "Checkpoint to a Hugging Face folder."),
    "inspect": ("mindspeed_tools.commands:inspect_command", "What a model folder, GGUF file or checkpoint holds."),
    "verify": (
        "mindspeed_tools.commands:verify_command",
        "Prove that a conversion computes what transformers computes.",
    ),
}
GROUP = command_group(
    "mindspeed-convert", "mindspeed-tools", "Convert weights between Hugging Face and Megatron, and prove it.", COMMANDS
)


def main() -> None:
    """Entry point."""
    run(GROUP)
