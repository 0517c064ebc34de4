# ruff: noqa: E501 - each template on a line of its own
"""Templates give under the meter what they give in Jinja's own sandbox."""

from __future__ import annotations

import json

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError
from engine.formats.chat_template import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "a b", "n": 2},
    {"role": "assistant", "content": "c <d>", "n": 1},
    {"role": "user", "content": "é", "n": 3},
]
TEMPLATES = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if loop.nextitem is defined }}{{ loop.cycle('x','y') }}{{ loop.changed(m.role) }}\n{% endfor %}",
    "{% for m in messages if m.role=='user' %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}",
    "{% macro f(a, b=2) %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ f(1) }}{{ f(1,3,4,k=5) }}",
    "{% macro box(t) %}<{{ t }}>{{ caller('z') }}</{{ t }}>{% endmacro %}{% call(u) box('b') %}in {{ u }}{{ messages[0].content }}{% endcall %}",
    "{% macro box(t) %}<{{ t }}>{{ caller() }}{% endmacro %}{% call box('b' ~ 'c') %}{% for i in range(3) %}{{ i }}{% endfor %}{% endcall %}",
    "{% filter upper %}abc {{ messages[1].content }}{% endfilter %}",
    "{% filter replace('a','bb') | upper %}abca{% endfilter %}",
    "{% for x in [[1,[2,3]],[4]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ x|length }}",
    "{% set x | upper %}a{{ 1 }}b{% endset %}{{ x }}",
    "{% set n=namespace(a=1,l=[]) %}{% for m in messages %}{% set n.a=n.a+m.n %}{% set n.l = n.l + [m.role] %}{% endfor %}{{ n.a }}{{ n.l }}",
    "{{ messages | map(attribute='content') | join(', ') }}|{{ messages | map('length') | list }}|{{ messages|selectattr('role','equalto','user')|list|length }}|{{ messages|rejectattr('n','gt',1)|map(attribute='n')|first }}",
    "{{ messages|groupby('role')|map('first')|list }}{% for r, ms in messages|groupby('role') %}{{ r }}{{ ms|length }}{% endfor %}",
    "{{ messages|sort(attribute='n')|map(attribute='n')|list }}{{ messages|sum(attribute='n') }}{{ [1,2.5]|sum(start=1) }}{{ messages|map(attribute='n')|max }}",
    "{{ 'a-b-c'.split('-')[-1] }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ 'x'.join(['a','b']) }}{{ 'a b'.title() }}{{ ' a '.strip() }}{{ 'aXbX'.replace('X','') }}{{ 'aXbX'.replace('X','y',1) }}{{ '%s-%d'|format('a',3) }}{{ '{}{x}'.format(1,x=2) }}{{ '%05d' % 3 }}{{ 'ab'.ljust(5) }}|{{ 'a'.startswith('a') }}",
    "{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\nb\n'|indent('> ') }}",
    "{{ 1.2345|round(2) }}{{ 2.5|round }}{{ 1.2|round(0,'ceil') }}{{ 7//2 }}{{ 2**5 }}{{ 7%3 }}{{ -3|abs }}",
    "{{ messages|tojson }}{{ messages|tojson(indent=2) }}",
    "{{ none }}{{ true }}{{ 1.0 }}{{ [1,'a',none] }}{{ {'a':1} }}{{ undefinedx }}{{ messages[9] }}{{ undefinedx|default('d') }}{{ undefinedx is defined }}",
    "{{ 1 ~ 'a' ~ none ~ [1] ~ undefinedx }}{{ 'a' ~ (1 if false) }}",
    "{{ 'x' if messages|length > 2 else 'y' }}{{ messages[0]['content'] }}{{ messages|last }}{{ messages[-1].content }}{{ messages[:2]|length }}",
    "{{ dict(a=1).items()|list }}{% for k,v in {'b':1,'a':2}|dictsort %}{{ k }}{{ v }}{% endfor %}{{ {'a':1}.get('b',3) }}{{ {'a':1}|items|list }}",
    "{% for i in range(3) %}{% for j in range(2) %}{{ loop.index0 }}{% if j %}{% continue %}{% endif %}{{ i }}{% endfor %}{% if i==1 %}{% break %}{% endif %}{% endfor %}",
    "{% with a=1, b=messages[0].role %}{{ a }}{{ b }}{% endwith %}",
    "{% if messages is string %}s{% elif messages is sequence %}q{% endif %}{{ 'user' in messages|map(attribute='role') }}{{ 3 in [1,2] }}",
    "{% raw %}{{ x }}{% endraw %}{# c #}{{- ' a ' -}}  b",
    "{% set c = cycler('a','b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{% set j=joiner(',') %}{{ j() }}{{ j() }}",
    "{{ 'a,b'|replace(',',';') }}{{ 'abc'|first }}{{ 'abc'|reverse }}{{ [3,1]|reverse|list }}{{ ['a','a']|unique|list }}{{ 'a b c'|wordcount }}{{ 'abcdefghi'|truncate(5) }}{{ '<a>'|e }}{{ '<a>'|striptags }}{{ 'abc'|list }}{{ 5|string }}{{ '5'|int + 1 }}{{ '5.5'|float }}",
    "{% block a %}x{{ messages[0].n }}{% endblock %}",
    "{% for k in {'x':1} %}{{ k }}{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}",
    "{{ [1,2]|join }}{{ [1,2]|join('-') }}{{ messages|join('|', attribute='role') }}{{ messages|map(attribute='zzz', default='q')|join }}",
    "{{ [{'a': {'b': 1}}, {'a': {'b': 'x'}}, {'a': {}}]|join(', ', attribute='a.b') }}{{ [[[1, 2]], [[3, 4]]]|join('-', attribute='0.1') }}{{ [[1, 2], [3, 4]]|join('-', attribute=1) }}{{ [[1, 2], [3, 4]]|join('-', attribute='0') }}",
    "{{ [[1], [2, 3]]|sum(start=[]) }}{{ [(1,), (2,)]|sum(start=()) }}{{ [{'a': [1]}, {'a': [2]}]|sum(attribute='a', start=[0]) }}{{ []|sum(start=[]) }}{{ [{'a': {'b': 1}}, {'a': {'b': 2.5}}]|sum('a.b') }}{{ [true, 2]|sum }}",
    "{{ 'a' + 'b' }}{{ [1]+[2] }}{{ 'ab'*2 }}{{ [0]*3 }}{{ (1,2)+(3,) }}{{ 1+1.5 }}",
]


@pytest.fixture(scope="module")
def plain():
    """Jinja's sandbox as it comes, but for a tojson that escapes nothing."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return made


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_meter_changes_nothing(source, plain):
    known = {"messages": MESSAGES, "tools": None, "documents": None, "add_generation_prompt": True}
    assert ChatTemplate(source).render(MESSAGES) == plain.from_string(source).render(known)


def test_what_is_undefined_is_told_as_jinja_does():
    with pytest.raises(TemplateError, match="'absent' is undefined"):
        ChatTemplate("{{ absent.name }}").render(MESSAGES)


def test_a_long_conversation_has_room_for_its_own_length():
    messages = [{"role": "user", "content": "word " * 200_000}] * 20
    source = "{% for m in messages %}{% set t = m.content | trim %}{{ t + t[5:] }}{% endfor %}"
    assert len(ChatTemplate(source).render(messages)) > 39_000_000
