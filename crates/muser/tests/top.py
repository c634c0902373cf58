"""`muser top` on a terminal: python top.py MUSER URL SERVER_PID

A pseudo-terminal stands for the terminal. Looks at the first frame, turns pages, changes the size, suspends and goes on, takes the
server away, and ends the program in each of the ways that there are; the terminal has to be as it was every time. Exits with 1 if
something is not as it should be.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

MUSER, URL, SERVER = sys.argv[1], sys.argv[2], int(sys.argv[3])
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Terminal:
    def __init__(self, columns, rows, url=URL, **env):
        self.main, self.side = pty.openpty()
        self.resize(columns, rows, tell=False)
        self.before = termios.tcgetattr(self.side)
        env = {"TERM": "xterm", "PATH": os.environ["PATH"], **env}
        words = [MUSER, "top", "--url", url, "--interval", "1"]
        streams = {"stdin": self.side, "stdout": self.side, "stderr": self.side}
        self.child = subprocess.Popen(words, env=env, start_new_session=True, preexec_fn=self.take, **streams)
        self.seen = ""

    def take(self):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, columns, rows, tell=True):
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, keys):
        os.write(self.main, keys.encode())

    def read(self, seconds):
        """Takes what has come; was there something?"""
        came = bool(select.select([self.main], [], [], seconds)[0])
        if came:
            self.seen += os.read(self.main, 65536).decode(errors="replace")
        return came

    def wait(self, what, found, seconds=20):
        end = time.monotonic() + seconds
        while not found(self.seen):
            assert time.monotonic() < end, f"{what} did not come within {seconds} s: {self.seen[-2000:]!r}"
            self.read(0.1)

    def frame(self):
        """The newest whole frame in lines."""
        last = self.seen.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
        return last.split("\r\n")

    def ended(self, code):
        end = time.monotonic() + 10
        while self.child.poll() is None:
            assert time.monotonic() < end, "it does not end"
            self.read(0.1)
        # A terminal gives some 4,000 bytes at a time.
        while self.read(0.1):
            pass
        assert self.child.returncode == code, (self.child.returncode, self.seen[-500:])
        assert termios.tcgetattr(self.side) == self.before, "the terminal is not as it was"
        assert self.seen.count(ENTER) == self.seen.count(LEAVE) > 0
        os.close(self.main)
        os.close(self.side)


def first_frame(terminal):
    terminal.wait("a frame", lambda seen: "page 1 of" in seen or "q\x1b[0m quit" in seen and "muse-tiny" in seen)


def pages_and_sizes():
    terminal = Terminal(80, 24)
    first_frame(terminal)
    assert len(terminal.frame()) == 24 and terminal.frame()[0].startswith("\x1b[1mmuser top"), terminal.frame()
    assert termios.tcgetattr(terminal.side)[3] & (termios.ECHO | termios.ICANON) == 0
    terminal.send("\x1b[B")
    terminal.wait("the next page", lambda seen: "page 2 of" in seen)
    terminal.resize(120, 40)
    os.killpg(terminal.child.pid, signal.SIGWINCH)
    terminal.wait("the new size", lambda _: len(terminal.frame()) == 40)
    terminal.send("\x1a")
    terminal.wait("the old screen", lambda seen: seen.endswith(LEAVE))
    assert termios.tcgetattr(terminal.side) == terminal.before, "the shell gets its terminal as it was"
    # Only what stands still can be told to go on.
    assert os.WIFSTOPPED(os.waitpid(terminal.child.pid, os.WUNTRACED)[1]), "it is suspended"
    os.killpg(terminal.child.pid, signal.SIGCONT)
    terminal.wait("the screen again", lambda seen: seen.count(ENTER) == 2)
    terminal.send("q")
    terminal.ended(0)


def every_end():
    for send, code in [
        (lambda terminal: terminal.send("\x03"), 130),
        (lambda terminal: terminal.child.send_signal(signal.SIGTERM), 0),
        (lambda terminal: terminal.child.send_signal(signal.SIGINT), 130),
    ]:
        terminal = Terminal(80, 24)
        first_frame(terminal)
        send(terminal)
        terminal.ended(code)


def colours():
    for env, coloured in [({}, True), ({"NO_COLOR": "1"}, False)]:
        terminal = Terminal(80, 24, **env)
        first_frame(terminal)
        assert ("\x1b[32m" in terminal.seen) == coloured, env
        terminal.send("q")
        terminal.ended(0)


def no_screen():
    """A terminal that can do nothing gets the plain text."""
    terminal = Terminal(80, 24, TERM="dumb")
    terminal.wait("the legend", lambda seen: "m measured" in seen)
    assert "\x1b" not in terminal.seen
    assert terminal.child.wait(10) == 0


def server_away():
    terminal = Terminal(80, 24)
    first_frame(terminal)
    os.kill(SERVER, signal.SIGKILL)
    terminal.wait("the loss", lambda seen: "trying again every 1 s" in seen and "away" in seen)
    assert any("muse-tiny" in line for line in terminal.frame()), "what was known stays"
    terminal.send("q")
    terminal.ended(0)
    # Nobody was there from the start: it waits for one.
    terminal = Terminal(80, 24)
    terminal.wait("the trouble", lambda seen: "trying again every 1 s" in seen)
    terminal.send("\x03")
    terminal.ended(130)


for test in (pages_and_sizes, every_end, colours, no_screen, server_away):
    test()
    print("ok  ", test.__name__)
