#!/usr/bin/env python3
"""Renders the chart, as Helm does, with what PyPI's helm-python-sdk has of it.

  render.py CHART NAME VALUES      prints the manifests
"""
import sys
import typing

import yaml
from helm_python.chart import Chart


def render(chart: str, name: str, values: dict[str, typing.Any]) -> str:
    with Chart.load(chart) as loaded:
        files = loaded.render(values=values, name=name)
    return "---\n".join(text.strip().removeprefix("---").lstrip("\n") + "\n" for path, text in sorted(files.items()) if path.endswith(".yaml"))


if __name__ == "__main__":
    chart, name, values = sys.argv[1:]
    with open(values, encoding="utf-8") as file:
        print("# Written by deploy/kubernetes/render.py from the chart deploy/helm/rejoin and values.yaml beside this file, as\n"
              "# 'helm template train' writes it: change those, and run './run package --check'.")
        print(render(chart, name, yaml.safe_load(file)), end="")
