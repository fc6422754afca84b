"""Doxygen's view of a header: the comments that stand before or behind a declaration become documentation. The headers themselves stay plain."""
import re
import sys


def escape(text):
    """Outside of `code` nothing means anything to Doxygen."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone one
        parts = ["'".join(parts)]
    return "`".join(part if i % 2 else re.sub(r"([\\@<>#&%*_$\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def main():
    lines = open(sys.argv[1], encoding="utf-8").read().split("\n")
    out, behind, code, head = [], None, False, True
    for number, line in enumerate(lines):
        alone = re.match(r"^(\s*)//( ?)(.*)$", line)
        trailing = None if alone else re.match(r'^(.*?[;,{})\]>:\w]\s+)//(?!/) ?(.*)$', line)
        if alone and alone[3].startswith("----"):
            out.append(line)  # a heading among declarations belongs to none of them
        elif alone:
            indent, text = alone[1], alone[3]
            continues = behind is not None and len(indent) >= behind
            mark = "///<" if continues else "///"
            example = head and re.match(r"\s{2,}[^\s-]", text) is not None and (code or lines[number - 1].strip() == "//")
            prefix = ""
            if head and number == 0:
                prefix = f"{indent}/// \\file\n"
            if example and not code:
                prefix += f"{indent}/// \\code\n"
                code = True
            elif code and not text.startswith("  "):
                prefix += f"{indent}/// \\endcode\n"
                code = False
            out.append(f"{prefix}{indent}{mark} {text if code else escape(text)}")
        else:
            if code:  # the comment ends with its example
                out[-1] += "\n/// \\endcode"
                code = False
            head = head and line.startswith("//")
            if trailing and trailing[1].rstrip().endswith("{"):  # of what begins here
                indent = re.match(r"\s*", line)[0]
                out.append(f"{indent}/// {escape(trailing[2])}\n{trailing[1].rstrip()}")
                behind = None
                continue
            if trailing and "://" not in line:
                behind = len(trailing[1])
                out.append(f"{trailing[1]}///< {escape(trailing[2])}")
                continue
            behind = None
            out.append(line)
    sys.stdout.write("\n".join(out))


main()
