"""The flags of a distillation, in addition to upstream's."""

from argparse import ArgumentParser

TEACHER_ARG = "export_kd_teacher_load"


def add_modelopt_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the --export-kd-* flags; upstream's parser calls this as its `extra_args_provider`."""
    group = parser.add_argument_group(title="knowledge distillation")
    group.add_argument(
        "--export-kd-teacher-load",
        metavar="FOLDER",
        help="the teacher's checkpoints; model_config.yaml there, if any, describes its model",
    )
    group.add_argument(
        "--export-kd-cfg",
        metavar="FILE",
        help="YAML: the compared layers and the weights of losses; default: only the logits",
    )
    group.add_argument(
        "--export-kd-finalize",
        action="store_true",
        help="build only the student, without the modules that its distillation added",
    )
    return parser
