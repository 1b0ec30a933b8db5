//! Turns the model, a folder of YAML files, into Rust.

#[path = "src/compile.rs"]
mod compile;

use std::path::Path;
use std::{env, fs};

use compile::{File, compile};

/// In the order in which they are listed.
const PRODUCTS: [&str; 3] = ["kkp.yaml", "kublr.yaml", "portico.yaml"];

fn main() -> Result<(), String> {
    println!("cargo::rerun-if-changed=model");
    println!("cargo::rerun-if-changed=src/compile.rs");
    println!("cargo::rerun-if-changed=src/compile/tables.rs");
    let read = |name: &str| {
        fs::read_to_string(Path::new("model").join(name)).map_err(|error| format!("model/{name}: {error}"))
    };
    let names = ["facts.yaml", "providers.yaml", "limits.yaml"].into_iter().chain(PRODUCTS);
    let texts: Vec<(String, String)> =
        names.map(|name| Ok((format!("model/{name}"), read(name)?))).collect::<Result<_, String>>()?;
    let files: Vec<File<'_>> = texts.iter().map(|(name, text)| File { name, text }).collect();
    let [facts, providers, limits, products @ ..] = &files[..] else {
        return Err("the model has too few files".to_owned());
    };
    let code = compile(facts, products, providers, limits)?;
    let folder = env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    fs::write(Path::new(&folder).join("model.rs"), code).map_err(|error| format!("model.rs: {error}"))
}
