"""Templates that a hostile model file could carry, by what they try."""

from __future__ import annotations

# Attempts to reach Python objects, files or other templates, or to change what the caller owns.
REACH = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by filter": "{{ ''|attr('__class__') }}",
    "classes by map": "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages).x.y }}",
    "template": "{{ self.__init__.__globals__ }}",
    "context": "{{ self._TemplateReference__context.environment.globals }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "global": "{{ namespace.__init__.__globals__ }}",
    "exception": "{{ raise_exception.__globals__.x }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('true') }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "builtin": "{{ open('marker', 'w') }}",
    "include": "{% include 'marker' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'base' %}",
    "generator frame": "{{ (messages|map('upper')).gi_frame.f_back.x }}",
}  # fmt: skip

# Attempts to make a value or a prompt of any size.
GROWTH = {
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition, swapped": "{{ 10**9 * 'a' }}",
    "repetition of a list": "{% set n = 10**9 %}{{ [0] * n }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent width": "{{ '%1000000000s' % 'x' }}",
    "percent star": "{{ '%*s' % (1000000000, 'x') }}",
    "percent precision": "{{ '%.1000000000f' % 1.0 }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "indent": "{{ 'x\n\n'|indent(1000000000) }}",
    "indent in a condition": "{% if 'a'|indent(1000000000) %}{% endif %}",
    "indent by text": "{{ ('x\n' * 100000)|indent('    ' * 100) }}",
    "json indent": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "rounding": "{{ 1.5|round(1000000000, 'ceil') }}",
    "replacement": "{% set a = 'a' * 100000 %}{{ a|replace('a', a) }}",
    "replacement method": "{% set a = 'a' * 100000 %}{{ a.replace('', a) }}",
    "replacement by keyword": "{% set a = 'a' * 100000 %}{{ a|replace(old='a', new=a) }}",
    "views": "{% set d = {'a': 'a' * 10000000} %}{{ '%(a)s' * 1000000 % {'a': d.items()} }}",
    "join": "{% set a = 'a' * 1000000 %}{{ ([a] * 10000)|join }}",
    "join separator": "{% set a = 'a' * 1000000 %}{{ range(99999)|join(a) }}",
    "join method": "{% set a = 'a' * 1000000 %}{{ a.join('x' * 100000) }}",
    "date": "{{ strftime_now('%c' * 100000) }}",
    "number from text": "{{ ('f' * 10000000)|int(base=16) }}",
    "doubling +": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling ~": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling a block": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s %}"
    "{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% endfor %}",
    "doubling by call": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}"
    "{{ 'x' * 10000000 }}{% endcall %}{% endcall %}",
    "shared lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s }}",
    "shared tuples": "{% set ns = namespace(s=(1,)) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}"
    "{% endfor %}{{ {ns.s: 1} }}",
    "shared arguments": "{% macro m(ns) %}{% set ns.s = varargs %}{% endmacro %}{% set ns = namespace(s=(1,)) %}"
    "{% for i in range(60) %}{{ m(ns, ns.s, ns.s) }}{% endfor %}{{ {ns.s: 1} }}",
    "shared mappings": "{% set ns = namespace(s=1) %}{% for i in range(60) %}"
    "{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}"
    "{{ ns.s|tojson }}",
    "kept slices": "{% set a = 'a' * 10000000 %}{% set ns = namespace(l=0) %}{% for i in range(99999) %}"
    "{% set ns.l = namespace(p=ns.l, s=a[i:]) %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}  # fmt: skip

# Attempts to work without end, or for longer than anyone would wait.
WORK = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that select nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "nested filters": "{% for a in range(99999) %}{% if range(99999)|select('odd')|list %}{% endif %}{% endfor %}",
    "recursive loops": "{% for a in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "branching macros": "{% macro m(n) %}{% if n %}{% set x = m(n - 1) %}{% set y = m(n - 1) %}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "constant output": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 99 + "{% endfor %}"
    "{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested iterators": "{% set ns = namespace(g=[1]) %}{% for i in range(90000) %}{% set ns.g = ns.g|map('abs') %}"
    "{% endfor %}{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "nested loop objects": "{% set ns = namespace(g=1) %}{% for i in range(9000) %}{% for x in [ns.g, 1] %}"
    "{% set ns.g = loop %}{% break %}{% endfor %}{% endfor %}{% for i in range(99999) %}{% for i in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "colons in a format": "{% set a = '{' + ':' * 1000000 + '1' * 3 + '}' %}{% for i in range(99999) %}"
    "{% if a.format(1) %}{% endif %}{% endfor %}",
    "nested loops in the source": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
}  # fmt: skip
