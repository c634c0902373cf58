//! `muser chat`: a conversation, turn by turn.
//!
//! Every turn sends the whole conversation; the engine knows what it read before and reads only what is new. With packs the
//! next chat that begins alike knows it too. Ctrl-C stops an answer (what was said stays part of the conversation), at the
//! prompt it clears the line; Ctrl-D leaves.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::cli::ChatArgs;
use crate::env_vars;
use crate::generate::{Answer, ChatPrompt, Printer, Prompt, Session};
use crate::images;
use crate::interrupt::Interrupt;
use crate::nodes::NodeWish;
use crate::output::{Console, HintExt as _};
use crate::packs::PackFolder;

const HELP: &str = "\
/reset         forget the conversation
/system TEXT   replace the instructions and forget the conversation; without TEXT show them
/image FILE    show an image (PNG, JPEG, WebP or GIF) with what is said next
/help          this list
/quit          leave (so does Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.";

/// Runs the command.
pub fn run(args: ChatArgs, console: &Console) -> anyhow::Result<()> {
    // One press stops an answer; who presses three times while nothing happens wants out.
    let interrupt = Interrupt::install(3);
    let packs = args.pack.clone().map(|dir| (PackFolder::from_flag(dir), &args.packs));
    let nodes = NodeWish { use_of: args.nodes.choice(), ..NodeWish::default() };
    let session = Session::open(&args.model, &args.draft, &args.projector, packs, nodes, console)?;
    if session.template.is_none() {
        return Err(anyhow::anyhow!("{}: the model has no chat template", session.label))
            .hint("`muser run --raw` continues a text without one");
    }
    console.note(format!("{}; /help lists commands", session.label));
    let mut lines = Lines::open(console, args.no_history)?;
    let mut talk =
        Talk { session, args, system: None, turns: Vec::new(), images: Vec::new(), shown: Vec::new() };
    talk.system = talk.args.system.take();
    while let Some(line) = lines.next()? {
        match Input::parse(&line) {
            Input::Nothing => {}
            Input::Quit => break,
            Input::Help => console.note(HELP),
            Input::Reset => {
                talk.forget();
                console.note("the conversation is forgotten");
            }
            Input::System(None) => {
                console.note(talk.system.as_deref().unwrap_or("there are no instructions"));
            }
            Input::System(Some(text)) => {
                talk.system = Some(text.to_owned());
                talk.forget();
                console.note("new instructions; the conversation is forgotten");
            }
            Input::Image(None) => console.warning("/image wants the path of a file"),
            Input::Image(Some(path)) => talk.look(path, console),
            Input::Unknown(command) => console.warning(format!("{command} is no command; /help lists them")),
            Input::Say(text) => talk.turn(text, &interrupt, console)?,
        }
    }
    talk.session.keep(console);
    Ok(())
}

struct Talk {
    session: Session,
    args: ChatArgs,
    system: Option<String>,
    /// Messages after the instructions, in the API's shape.
    turns: Vec<Value>,
    /// Images of the turns, in order.
    images: Vec<Arc<[u8]>>,
    /// Images that the next turn shows.
    shown: Vec<Arc<[u8]>>,
}

impl Talk {
    fn forget(&mut self) {
        self.turns.clear();
        self.images.clear();
        self.shown.clear();
    }

    fn look(&mut self, path: &str, console: &Console) {
        if let Err(reason) = &self.session.sight {
            console.error(reason);
            return;
        }
        match images::read(Path::new(path)) {
            Ok(bytes) => {
                self.shown.push(bytes);
                console.note("the image is shown with what you say next");
            }
            Err(error) => console.error(format!("{error:#}")),
        }
    }

    fn turn(&mut self, text: &str, interrupt: &Interrupt, console: &Console) -> anyhow::Result<()> {
        interrupt.reset();
        let mut said = ChatPrompt::new(None, text);
        said.show(std::mem::take(&mut self.shown));
        let new = said.images.len();
        self.images.append(&mut said.images);
        self.turns.append(&mut said.messages);
        let system = self.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let prompt = Prompt::Chat(ChatPrompt {
            messages: system.chain(self.turns.iter().cloned()).collect(),
            tools: Vec::new(),
            reasoning: self.args.reasoning,
            images: self.images.clone(),
        });
        let mut printer = Printer::new(console);
        let outcome = self.session.answer(&prompt, &self.args.sampling, interrupt, &mut printer);
        printer.finish()?;
        match outcome {
            Ok(answer) => {
                self.remember(&answer);
                remarks(&answer, console);
                Ok(())
            }
            Err(error) if error.downcast_ref::<std::io::Error>().is_some() => Err(error),
            Err(error) => {
                // The turn did not happen; the conversation goes on as it was.
                self.turns.pop();
                self.images.truncate(self.images.len() - new);
                console.error(format!("{error:#}"));
                if matches!(error.downcast_ref(), Some(muser_engine::SubmitError::ContextLength { .. })) {
                    console.hint("/reset forgets the conversation, --ctx gives it more room");
                }
                Ok(())
            }
        }
    }

    fn remember(&mut self, answer: &Answer) {
        let mut message = json!({ "role": "assistant", "content": answer.text });
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.as_str().into();
        }
        self.turns.push(message);
    }
}

fn remarks(answer: &Answer, console: &Console) {
    if answer.finish_reason == "context" {
        console.warning("the context is full: the answer ends here; /reset forgets the conversation");
    }
    let stopped = if answer.finish_reason == "interrupted" { "stopped; " } else { "" };
    console.note(format!("{stopped}{}", answer.speed()));
}

/// What a line means.
#[derive(Debug, PartialEq, Eq)]
enum Input<'a> {
    Nothing,
    Quit,
    Help,
    Reset,
    System(Option<&'a str>),
    Image(Option<&'a str>),
    Unknown(&'a str),
    Say(&'a str),
}

impl<'a> Input<'a> {
    fn parse(line: &'a str) -> Self {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("", _) => Self::Nothing,
            ("/quit" | "/exit" | "/bye", "") => Self::Quit,
            ("/help" | "/?", "") => Self::Help,
            ("/reset" | "/clear", "") => Self::Reset,
            ("/system", "") => Self::System(None),
            ("/system", text) => Self::System(Some(text)),
            ("/image", "") => Self::Image(None),
            ("/image", path) => Self::Image(Some(path)),
            // A path or a fraction is something to say; a command is one word of letters.
            (word, "") if word.starts_with('/') && word[1..].chars().all(|c| c.is_ascii_lowercase()) => {
                Self::Unknown(word)
            }
            _ => Self::Say(line),
        }
    }
}

/// Lines with editing and history on a terminal, plain lines otherwise.
struct Lines<'a> {
    editor: DefaultEditor,
    history: Option<PathBuf>,
    console: &'a Console,
}

impl<'a> Lines<'a> {
    fn open(console: &'a Console, no_history: bool) -> anyhow::Result<Self> {
        let mut editor = DefaultEditor::new()?;
        let home = env_vars::muser_home().filter(|_| !no_history);
        let history = home.map(|home| home.join("chat_history"));
        if let Some(path) = &history {
            // The first time there is none.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, console })
    }

    /// The next input, continued lines joined; `None` at the end.
    fn next(&mut self) -> anyhow::Result<Option<String>> {
        let mut input = String::new();
        let mut prompt = "> ";
        loop {
            match self.editor.readline(prompt) {
                Ok(line) => {
                    let Some(begun) = line.strip_suffix('\\') else {
                        input.push_str(&line);
                        self.remember(&input);
                        return Ok(Some(input));
                    };
                    input.push_str(begun);
                    input.push('\n');
                    prompt = ". ";
                }
                Err(ReadlineError::Interrupted) => {
                    if input.is_empty() {
                        self.console.note("Ctrl-D or /quit leaves");
                    }
                    input.clear();
                    prompt = "> ";
                }
                Err(ReadlineError::Eof) => return Ok((!input.is_empty()).then_some(input)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Saved at once, so that a chat that ends badly loses nothing.
    fn remember(&mut self, input: &str) {
        if !self.console.stderr_is_terminal() || input.trim().is_empty() {
            return;
        }
        let added = self.editor.add_history_entry(input).unwrap_or(false);
        if let (true, Some(path)) = (added, &self.history) {
            let saved = path
                .parent()
                .map_or(Ok(()), std::fs::create_dir_all)
                .map_err(ReadlineError::from)
                .and_then(|()| self.editor.save_history(path));
            if let Err(error) = saved {
                self.console.warning(format!("{}: the history cannot be saved: {error}", path.display()));
                self.history = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Input;

    #[test]
    fn commands_and_what_looks_like_them() {
        fn check(line: &str, expected: &Input<'_>) {
            assert_eq!(&Input::parse(line), expected, "{line:?}");
        }
        check("  ", &Input::Nothing);
        check("/quit ", &Input::Quit);
        check("/reset", &Input::Reset);
        check("/system", &Input::System(None));
        check("/image  my dog.png ", &Input::Image(Some("my dog.png")));
        check("/image", &Input::Image(None));
        check("/system  Be brief. ", &Input::System(Some("Be brief.")));
        check("/rest", &Input::Unknown("/rest"));
        check("/etc/passwd is a file", &Input::Say("/etc/passwd is a file"));
        check("/usr/bin", &Input::Say("/usr/bin"));
        check(" hello ", &Input::Say("hello"));
        check("/quit smoking how?", &Input::Say("/quit smoking how?"));
    }
}
