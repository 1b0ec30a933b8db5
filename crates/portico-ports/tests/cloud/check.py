"""Checks rules for a cloud against what its vendor publishes, or files of the model against their schema.

    check.py aws|azure|gcp|openstack|terraform-aws|model FILE...

Prints the files with mistakes, one a line, and what they are on standard error. requirements.txt pins what is
asked.
"""

import json
import shlex
import sys
from pathlib import Path


def aws(text):
    """The resource schemas of CloudFormation, which cfn-lint carries."""
    from cfnlint.api import lint_all

    # Errors and warnings; the rest is advice.
    mistakes = [str(match) for match in lint_all(text) if match.rule.id[0] in "EW"]
    for resource in json.loads(text)["Resources"].values():
        for direction in ("SecurityGroupIngress", "SecurityGroupEgress"):
            mistakes += twice(resource["Properties"].get(direction, []), "Description")
    return mistakes


def twice(rules, description):
    """The rules that stand twice, whatever describes them: clouds refuse the second."""
    bare = [{key: value for key, value in rule.items() if key != description} for rule in rules]
    return [f"it stands twice: {rule}" for number, rule in enumerate(bare) if rule in bare[:number]]


def azure(text):
    """Microsoft's model of a network security group: required fields, enumerations, and no unknown field."""
    from azure.mgmt.network import models

    template = json.loads(text)
    mistakes = []
    for resource in template["resources"]:
        if resource["type"] != "Microsoft.Network/networkSecurityGroups":
            mistakes.append(f"unexpected type {resource['type']}")
        body = {"location": resource["location"], "properties": resource["properties"]}
        group = models.NetworkSecurityGroup.deserialize(body)
        if group.serialize() != body:
            mistakes.append(f"fields that the model has not: {body} became {group.serialize()}")
        names, places = set(), set()
        for rule in group.security_rules:
            required = [key for key, rules in rule._validation.items() if rules.get("required")]
            mistakes += [f"{rule.name}: {key} is missing" for key in required if getattr(rule, key) is None]
            for value, known in (
                (rule.direction, models.SecurityRuleDirection),
                (rule.access, models.SecurityRuleAccess),
                (rule.protocol, models.SecurityRuleProtocol),
            ):
                if value not in {member.value for member in known}:
                    mistakes.append(f"{rule.name}: {value} is none of {list(known)}")
            if not 100 <= rule.priority <= 4096:
                mistakes.append(f"{rule.name}: priority {rule.priority}")
            if rule.name in names or (rule.direction, rule.priority) in places:
                mistakes.append(f"{rule.name}: name or priority stands twice")
            names.add(rule.name)
            places.add((rule.direction, rule.priority))
            prefixes = (rule.source_address_prefixes or []) + (rule.destination_address_prefixes or [])
            if len({":" in prefix for prefix in prefixes}) > 1:
                mistakes.append(f"{rule.name}: a rule holds one address family")
    return mistakes


def gcp(text):
    """Google's message type of a firewall rule: an unknown field or a wrong type does not parse."""
    import re

    from google.cloud.compute_v1.types import Firewall

    mistakes = []
    names = set()
    for rule in json.loads(text):
        parsed = Firewall.from_json(json.dumps(rule), ignore_unknown_fields=False)
        if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", parsed.name) or parsed.name in names:
            mistakes.append(f"{parsed.name}: no name, or it stands twice")
        names.add(parsed.name)
        if parsed.direction not in Firewall.Direction.__members__:
            mistakes.append(f"{parsed.name}: direction {parsed.direction}")
        ranges = list(parsed.source_ranges) + list(parsed.destination_ranges)
        if len({":" in network for network in ranges}) != 1:
            mistakes.append(f"{parsed.name}: a rule holds one address family")
    return mistakes


def openstack(text):
    """The parsers of the openstack command: every line of the script is a command that they take."""
    from importlib.metadata import entry_points

    commands = {
        point.name.replace("_", " "): point
        for point in entry_points(group="openstack.network.v2")
        if point.name.startswith("security_group")
    }
    mistakes, created = [], []
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split("|"):
            part = part.strip().removeprefix("xargs -r ")
            if not part.startswith("openstack "):
                continue
            words = shlex.split(part)[1:]
            beginnings = (" ".join(words[:end]) for end in range(len(words), 0, -1))
            name = next((beginning for beginning in beginnings if beginning in commands), None)
            if name is None:
                mistakes.append(f"no such command: {part}")
                continue
            command = commands[name].load()(_Application(), None, cmd_name=name)
            rest = words[len(name.split()):]
            # The ids to delete come from the pipe.
            rest = rest or ["an-id"]
            try:
                parsed = command.get_parser(name).parse_args(rest)
                created.append({"command": name, **vars(parsed)})
            except SystemExit:
                mistakes.append(f"not understood: {part}")
    mistakes += twice(created, "description")
    return mistakes or ([] if created else ["no command"])


class _Application:
    """What a command asks of the program it belongs to, before it connects anywhere."""

    command_options = []

    class command_manager:  # noqa: N801
        namespace = "openstack.cli"

    class client_manager:  # noqa: N801
        @staticmethod
        def is_network_endpoint_enabled():
            return True


def terraform_aws(text):
    """HCL, as python-hcl2 reads it, and the arguments that the provider documents."""
    import io

    import hcl2

    rule = {
        "security_group_id", "description", "ip_protocol", "from_port", "to_port", "cidr_ipv4", "cidr_ipv6",
    }
    known = {
        "aws_security_group": {"name", "description", "vpc_id"},
        "aws_vpc_security_group_ingress_rule": rule,
        "aws_vpc_security_group_egress_rule": rule,
    }
    mistakes, seen, rules = [], set(), []
    for block in hcl2.load(io.StringIO(text))["resource"]:
        for kind, named in block.items():
            kind = kind.strip('"')
            for name, body in named.items():
                arguments = {key: value for key, value in body.items() if not key.startswith("__")}
                if (kind, name) in seen:
                    mistakes.append(f"{kind} {name} stands twice")
                seen.add((kind, name))
                rules.append({"kind": kind, **arguments})
                unknown = arguments.keys() - known.get(kind, set())
                if unknown:
                    mistakes.append(f"{kind} {name}: {unknown}")
    mistakes += twice(rules, "description")
    return mistakes or ([] if seen else ["no resource"])


def model(text):
    """A file of the model against its JSON schema."""
    import jsonschema
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2, as the build script reads it: yes and no are text."""

    Loader.yaml_implicit_resolvers = {
        first: [
            (tag, known)
            for tag, known in resolvers
            if tag != "tag:yaml.org,2002:bool" or first in "tTfF"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    with open(Path(__file__).parents[2] / "model/schema.json", encoding="utf-8") as file:
        validator = jsonschema.Draft202012Validator(json.load(file))
    validator.check_schema(validator.schema)
    errors = validator.iter_errors(yaml.load(text, Loader))
    return [f"{error.json_path}: {error.message}" for error in errors]


def main():
    checks = {
        "aws": aws, "azure": azure, "gcp": gcp, "openstack": openstack, "terraform-aws": terraform_aws,
        "model": model,
    }
    check = checks[sys.argv[1]]
    for file in map(Path, sys.argv[2:]):
        try:
            mistakes = check(file.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001: what cannot be read is wrong, whatever the parser raises
            mistakes = [repr(error)]
        if mistakes:
            print(file)
            print(f"{file.name}: " + "\n".join(mistakes), file=sys.stderr)


main()
