//! `muser run`: answers one prompt.

use std::io::Write as _;

use anyhow::Context as _;
use serde_json::Value;

use crate::cli::RunArgs;
use crate::generate::{Answer, ChatPrompt, Printer, Prompt, Session};
use crate::ids;
use crate::images;
use crate::interrupt::Interrupt;
use crate::nodes::NodeWish;
use crate::output::{Console, HintExt as _, interrupted};
use crate::packs::PackFolder;

/// Runs the command.
pub fn run(args: RunArgs, console: &Console) -> anyhow::Result<()> {
    let prompt = prompt(&args)?;
    let interrupt = Interrupt::install(2);
    let packs = args.pack.clone().map(|dir| (PackFolder::from_flag(dir), &args.packs));
    let nodes = NodeWish { use_of: args.nodes.choice(), ..NodeWish::default() };
    let session = Session::open(&args.model, &args.draft, &args.projector, packs, nodes, console)?;
    let answer = if args.json {
        let answer = session.answer(&prompt, &args.sampling, &interrupt, &mut ())?;
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &answer)?;
        writeln!(out)?;
        answer
    } else {
        let mut printer = Printer::new(console);
        let answer = session.answer(&prompt, &args.sampling, &interrupt, &mut printer)?;
        printer.finish()?;
        remarks(&answer, console);
        answer
    };
    session.keep(console);
    if answer.finish_reason == "interrupted" { Err(interrupted()) } else { Ok(()) }
}

fn prompt(args: &RunArgs) -> anyhow::Result<Prompt> {
    let text = match args.prompt.as_deref() {
        Some(text) if text != "-" => text.to_owned(),
        _ => {
            let mut text = ids::read_stdin("prompt")?;
            // The line end that `echo` and editors add is not part of what the user wants said.
            if text.ends_with('\n') {
                text.truncate(text.len() - 1 - usize::from(text.ends_with("\r\n")));
            }
            text
        }
    };
    if args.raw {
        return Ok(Prompt::Raw(text));
    }
    let mut chat = ChatPrompt::new(args.system.as_deref(), &text);
    chat.reasoning = args.reasoning;
    if let Some(path) = &args.tools {
        chat.tools = read_tools(path).with_context(|| path.display().to_string())?;
    }
    let images = args.image.iter().map(|path| images::read(path)).collect::<anyhow::Result<Vec<_>>>()?;
    chat.show(images);
    Ok(Prompt::Chat(chat))
}

fn read_tools(path: &std::path::Path) -> anyhow::Result<Vec<Value>> {
    let tools = match serde_json::from_str(&std::fs::read_to_string(path)?)? {
        Value::Array(tools) => tools,
        Value::Object(mut object) => match object.remove("tools") {
            Some(Value::Array(tools)) => tools,
            _ => vec![Value::Object(object)],
        },
        _ => {
            return Err(anyhow::anyhow!("expected an array of tools"))
                .hint("the shape is that of the API's `tools`");
        }
    };
    Ok(tools)
}

/// What the answer itself does not say.
fn remarks(answer: &Answer, console: &Console) {
    match answer.finish_reason {
        "context" => console.warning("the context is full: the answer ends here"),
        "length" if answer.text.is_empty() && !answer.reasoning.is_empty() => {
            console.warning("--max-tokens was used up by the reasoning, before the answer began");
        }
        _ => {}
    }
    if console.stderr_is_terminal() {
        console.note(answer.speed());
    }
}
