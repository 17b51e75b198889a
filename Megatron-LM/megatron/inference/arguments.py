"""The flags of a distillation, in addition to upstream's."""

from argparse import ArgumentParser

TEACHER_ARG = "export_kd_teacher_load"


def add_modelopt_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the --export-kd-* flags; upstream's parser calls this as its `extra_args_provider`."""
    group = parser.add_argument_group(title="knowledge distillation")
    group.add_argument(
        "--export-kd-teacher-load",
        metavar="FOLDER",
        help="the teacher's checkpoints; model_config.yaml there says what it is, else they do",
    )
    group.add_argument(
        "--export-kd-cfg",
        metavar="FILE",
        help="YAML: which layers are compared, and how the losses add up; default: logits alone",
    )
    group.add_argument(
        "--export-kd-finalize",
        action="store_true",
        help="build the student alone, as it was before its distillation",
    )
    return parser
