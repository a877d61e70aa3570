"""A terminal that keeps its text, for tests of progress bars."""

import io
import re


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Lines on the terminal, without blank lines."""
        lines, row = [""], 0
        for code in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if code == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif code == "\x1b[1A":
                row -= 1
            elif code == "\x1b[2K":
                lines[row] = ""
            elif code[0] not in "\x1b\r":
                lines[row] += code
        return [line for line in lines if line.strip()]
