"""The argument rules of python/gqa_attn/_rules.py as C++: csrc/generated/rules.h."""

import ast
import importlib.util
from pathlib import Path

_TYPES = {float: "double", bool: "bool", int: "int64_t", str: "std::string_view"}
_OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def _load_rules():
    """By path: importing it as gqa_attn._rules would import the package, and with it torch."""
    path = Path(__file__).parent.parent / "python" / "gqa_attn" / "_rules.py"
    spec = importlib.util.spec_from_file_location("gqa_attn_rules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_rules = _load_rules()


def rules_header():
    """The text of rules.h: the facts of a call and one check per op, throwing std::runtime_error with the rule's message."""
    return f"""\
// Written by codegen/rules.py from python/gqa_attn/_rules.py; do not edit.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "facts.h"

namespace gqa_attn::rules {{

struct Facts {{
  TensorFacts {', '.join(_rules.BACKWARD_TENSORS)};
{_fields(_rules.SCALARS)}
{_fields(_rules.DERIVED)}
}};

{_check('check_forward', _rules.FORWARD_RULES)}

{_check('check_backward', _rules.BACKWARD_RULES)}

}}  // namespace gqa_attn::rules
"""


def _fields(facts):
    return "\n".join(f"  {_TYPES[kind]} {name}{{}};" for name, kind in facts.items())


def _check(name, rules):
    checks = "\n".join(f"  if (!{_expression(rule.condition)}) {{\n    throw std::runtime_error({_message(rule)});\n  }}"
                       for rule in rules)
    return f"inline void {name}(const Facts& f) {{\n{checks}\n}}"


def _message(rule):
    parts = _rules.FIELD.split(rule.message)  # text, fact, text, fact, ..., text
    return " + ".join(f"text({_expression(part)})" if odd else _string(part)
                      for odd, part in ((i % 2, part) for i, part in enumerate(parts)) if part)


def _expression(condition):
    return _cpp(ast.parse(condition, mode="eval").body)


def _cpp(node):
    """The subset of Python that rules use, each part in parentheses: precedences differ."""
    match node:
        case ast.Name(id=name):
            return f"f.{name}"
        case ast.Attribute(value=value, attr=name):
            return f"{_cpp(value)}.{name}"
        case ast.Constant(value=str() as value):
            return _string(value)
        case ast.Constant(value=int() as value):
            return str(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"(!{_cpp(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{_cpp(operand)})"
        case ast.BoolOp(op=op, values=values):
            return "(" + (" && " if isinstance(op, ast.And) else " || ").join(map(_cpp, values)) + ")"
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            return f"({_cpp(left)} % {_cpp(right)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_cpp(test)} ? {_cpp(body)} : {_cpp(orelse)})"
        case ast.Call(func=ast.Name(id="isfinite"), args=[argument]):
            return f"isfinite({_cpp(argument)})"
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple(elts=values)]):
            return "(" + " || ".join(f"({_cpp(left)} == {_cpp(value)})" for value in values) + ")"
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            pairs = zip([left, *comparators], ops, comparators)
            return "(" + " && ".join(f"({_cpp(a)} {_OPERATORS[type(op)]} {_cpp(b)})" for a, op, b in pairs) + ")"
        case ast.List(elts=values):
            return "std::initializer_list<int64_t>{" + ", ".join(map(_cpp, values)) + "}"
    raise ValueError(f"a rule uses {ast.unparse(node)}, which codegen/rules.py does not translate")


def _string(value):
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
