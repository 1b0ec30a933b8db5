//! Container images made without a container engine.
//!
//! An image is a tar in the docker-archive layout: a manifest, a config and one layer. That is all
//! `ctr images import` asks for, so no registry and no builder is needed. [`Image::from_containerfile`]
//! packs what a `Containerfile` of a static binary says, so that tests run the image as it ships, with a
//! binary that is built quickly.

use std::fs::{self, File};
use std::io::Cursor;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::programs;

/// `cap_net_bind_service=ep` of a file, as the kernel has it (`vfs_cap_data`): revision 2 and the flag
/// "effective", then two words of what is permitted, each before one of what is inherited.
const BINDS_LOW_PORTS: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A container image: files, and how to start it.
#[derive(Debug, Clone, Default)]
pub struct Image {
    name: String,
    more_names: Vec<String>,
    files: Vec<(String, PathBuf)>,
    low_ports: bool,
    links: Vec<(String, String)>,
    entrypoint: Vec<String>,
    user: String,
}

impl Image {
    /// An empty image; `name` with its tag, such as `lab/pause:1`. Kubernetes finds it under that
    /// name with `imagePullPolicy: Never` or `IfNotPresent`.
    pub fn new(name: &str) -> Image {
        Image { name: name.to_owned(), ..Image::default() }
    }

    /// Adds an executable file.
    pub fn file(mut self, inside: &str, from: &Path) -> Image {
        self.files.push((inside.trim_start_matches('/').to_owned(), from.to_path_buf()));
        self
    }

    /// Adds a symbolic link.
    pub fn link(mut self, inside: &str, target: &str) -> Image {
        self.links.push((inside.trim_start_matches('/').to_owned(), target.to_owned()));
        self
    }

    /// What it starts.
    pub fn entrypoint(mut self, command: &[&str]) -> Image {
        self.entrypoint = command.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// The user and group that it runs as, such as `65532:65532`; root if never said.
    pub fn user(mut self, user: &str) -> Image {
        user.clone_into(&mut self.user);
        self
    }

    /// This image under another name, as if it were another version.
    pub fn named(self, name: &str) -> Image {
        Image { name: name.to_owned(), ..self }
    }

    /// Gives the image one more name.
    fn also_named(mut self, name: String) -> Image {
        self.more_names.push(name);
        self
    }

    /// Its name with tag.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// busybox with its usual commands; starts what the pod says, or a shell. No `wget`: Debian's
    /// static busybox looks names up with a resolver that crashes where glibc is not installed.
    pub fn busybox() -> Result<Image> {
        let busybox = programs::find("busybox")?;
        let mut image = Image::new("lab/busybox:1").file("bin/busybox", &busybox).entrypoint(&["/bin/sh"]);
        for applet in [
            "sh",
            "cat",
            "echo",
            "head",
            "httpd",
            "ls",
            "mkdir",
            "nc",
            "nslookup",
            "printf",
            "rm",
            "seq",
            "sha256sum",
            "sleep",
            "tail",
            "tar",
            "true",
            "wget",
        ] {
            image = image.link(&format!("bin/{applet}"), "busybox");
        }
        Ok(image)
    }

    /// The image that holds a pod's namespaces.
    pub fn pause() -> Result<Image> {
        let busybox = programs::find("busybox")?;
        Ok(Image::new("lab/pause:1").file("busybox", &busybox).entrypoint(&["/busybox", "sleep", "infinity"]))
    }

    /// An admission webhook, which refuses objects whose name begins with `refused`.
    pub fn webhook() -> Result<Image> {
        let webhook = programs::konnectivity()?.join("webhook");
        Ok(Image::new("lab/webhook:1").file("webhook", &webhook).entrypoint(&["/webhook"]))
    }

    /// metrics-server as released, also under the name of upstream's image.
    pub fn metrics_server() -> Result<Image> {
        let program = programs::metrics_server()?.join("metrics-server");
        let version = programs::metrics_server_version()?;
        Ok(Image::new("lab/metrics-server:1")
            .also_named(format!("registry.k8s.io/metrics-server/metrics-server:{version}"))
            .file("metrics-server", &program)
            .entrypoint(&["/metrics-server"]))
    }

    /// Debian's Prometheus under `name`.
    pub fn prometheus(name: &str) -> Result<Image> {
        let program = programs::find("prometheus")?;
        let image = Image::new(name).file("bin/prometheus", &program).entrypoint(&["/bin/prometheus"]);
        let libraries = programs::libraries(&program)?;
        Ok(libraries.iter().fold(image, |image, library| image.file(&library.display().to_string(), library)))
    }

    /// CoreDNS under the name of upstream's image.
    pub fn coredns() -> Result<Image> {
        let program = programs::coredns()?.join("coredns");
        let name = format!("registry.k8s.io/coredns/coredns:{}", programs::coredns_version()?);
        Ok(Image::new(&name).file("coredns", &program).entrypoint(&["/coredns"]))
    }

    /// kube-proxy under the name of upstream's image, with this machine's `nft`.
    pub fn kube_proxy() -> Result<Image> {
        let (kube, nft) = (programs::kube()?.join("kube"), programs::find("nft")?);
        let name = format!("registry.k8s.io/kube-proxy:{}", programs::kube_version()?);
        let start = programs::checkout().join("lab/kube-proxy/kube-proxy");
        let mut image = Image::new(&name)
            .file("kube", &kube)
            .file("usr/local/bin/kube-proxy", &start)
            .file("bin/busybox", &programs::find("busybox")?)
            .file("usr/sbin/nft", &nft)
            // As upstream's image. Without it nft says 6 for tcp, and a kube-proxy that starts again takes
            // every Service that it finds for one that is gone.
            .file("etc/protocols", Path::new("/etc/protocols"));
        for applet in ["sh", "cat"] {
            image = image.link(&format!("bin/{applet}"), "busybox");
        }
        for library in programs::libraries(&nft)? {
            image = image.file(&library.display().to_string(), &library);
        }
        Ok(image)
    }

    /// The API server alone, whose file has the capability of upstream's: to listen on ports below 1024.
    pub fn api_server() -> Result<Image> {
        let name = format!("registry.k8s.io/kube-apiserver:{}", programs::kube_version()?);
        let program = programs::kube()?.join("kube");
        let image = Image::new(&name).file("usr/local/bin/kube-apiserver", &program);
        Ok(Image { low_ports: true, ..image })
    }

    /// Every Kubernetes program and etcd, for hosted control planes: the first argument names the program.
    /// Also under the names of upstream's images, with the programs where those have them: a plan of
    /// `portico-hosting` runs as it is written.
    pub fn kube() -> Result<Image> {
        let kube = programs::kube()?.join("kube");
        let mut image = Image::new("lab/kube:1").file("kube", &kube).entrypoint(&["/kube"]);
        for program in ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
            let tag = match program {
                "etcd" => programs::etcd_tag()?,
                _ => programs::kube_version()?,
            };
            image = image
                .link(&format!("usr/local/bin/{program}"), "/kube")
                .also_named(format!("registry.k8s.io/{program}:{tag}"));
        }
        Ok(image)
    }

    /// Portico's own image, as the `Containerfile` of this checkout describes it, around a static binary that
    /// is quicker to build than the one that ships. Named as in `deploy/`.
    pub fn portico() -> Result<Image> {
        let (containerfile, binary) = (programs::checkout().join("Containerfile"), programs::portico()?);
        Image::from_containerfile("localhost/portico:dev", &containerfile, &[("/portico/portico", &binary)])
    }

    /// The image a `Containerfile` describes, for the kind that ships a static binary and nothing
    /// else: its last stage is `FROM scratch` with COPY, USER and ENTRYPOINT. `binaries` says which
    /// file on this machine stands for each source of COPY, since earlier stages are not run.
    /// An instruction this does not know is an error: the tested image would not be the shipped one.
    pub fn from_containerfile(name: &str, containerfile: &Path, binaries: &[(&str, &Path)]) -> Result<Image> {
        let text = fs::read_to_string(containerfile)
            .with_context(|| format!("reading {}", containerfile.display()))?;
        let stage =
            last_stage(&text).with_context(|| format!("{} has no FROM scratch", containerfile.display()))?;
        let mut image = Image::new(name);
        for line in stage.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (instruction, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let words: Vec<&str> = rest.split_whitespace().filter(|word| !word.starts_with("--")).collect();
            match (instruction.to_ascii_uppercase().as_str(), words.as_slice()) {
                ("COPY", [source, target]) => {
                    let known = binaries.iter().find(|(path, _)| path == source);
                    let (_, from) = known
                        .with_context(|| format!("nothing was given to stand for {source} in `{line}`"))?;
                    image = image.file(target, from);
                }
                ("USER", [user]) => image = image.user(user),
                ("ENTRYPOINT", _) => {
                    image.entrypoint = serde_json::from_str(rest)
                        .with_context(|| format!("`{line}`: use the JSON form, there is no shell inside"))?;
                }
                // Words for people and registries: they change nothing about what runs.
                ("LABEL" | "EXPOSE", _) => {}
                _ => bail!("{}: the lab cannot pack `{line}`", containerfile.display()),
            }
        }
        Ok(image)
    }

    /// Packs the image into `dir` and returns the archive's path.
    pub fn pack(&self, dir: &Path) -> Result<PathBuf> {
        ensure!(self.name.contains(':'), "image name {:?} has no tag", self.name);
        let layer = dir.join("layer.tar");
        self.write_layer(&layer)?;
        let diff_id = programs::digest_of(std::slice::from_ref(&layer))?;
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "User": self.user,
                "Env": ["PATH=/usr/local/bin:/usr/sbin:/bin:/"],
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{diff_id}")]},
            "history": [{"created_by": "portico-lab"}],
        });
        let names: Vec<&String> = [&self.name].into_iter().chain(&self.more_names).collect();
        let manifest = json!([{"Config": "config.json", "RepoTags": names, "Layers": ["layer.tar"]}]);
        let archive = dir.join(format!("{}.tar", self.name.replace(['/', ':'], "-")));
        let mut tar = tar::Builder::new(
            File::create(&archive).with_context(|| format!("making {}", archive.display()))?,
        );
        append(&mut tar, "manifest.json", manifest.to_string().as_bytes())?;
        append(&mut tar, "config.json", config.to_string().as_bytes())?;
        tar.append_path_with_name(&layer, "layer.tar")?;
        tar.into_inner()?.sync_data()?;
        fs::remove_file(&layer)?;
        Ok(archive)
    }

    fn write_layer(&self, layer: &Path) -> Result<()> {
        let mut tar =
            tar::Builder::new(File::create(layer).with_context(|| format!("making {}", layer.display()))?);
        // Volumes and /tmp need nothing here: the runtime makes their mount points.
        for (inside, from) in &self.files {
            let mut file = File::open(from).with_context(|| format!("packing {}", from.display()))?;
            let mut header = header(0o755);
            header.set_size(file.metadata()?.len());
            if self.low_ports {
                tar.append_pax_extensions([("SCHILY.xattr.security.capability", &BINDS_LOW_PORTS[..])])?;
            }
            tar.append_data(&mut header, inside, &mut file)
                .with_context(|| format!("packing {}", from.display()))?;
        }
        for (inside, target) in &self.links {
            let mut header = header(0o777);
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            tar.append_link(&mut header, inside, target).with_context(|| format!("packing {inside}"))?;
        }
        tar.into_inner()?;
        Ok(())
    }
}

/// The text after the last `FROM`, if that is `FROM scratch`.
fn last_stage(containerfile: &str) -> Option<&str> {
    let mut stage = None;
    let mut end = 0;
    for line in containerfile.split_inclusive('\n') {
        end += line.len();
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|word| word.eq_ignore_ascii_case("FROM")) {
            stage = words.next().is_some_and(|base| base == "scratch").then(|| &containerfile[end..]);
        }
    }
    stage
}

fn header(mode: u32) -> tar::Header {
    // Owner 0 and time 0: the same content always gives the same digest.
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn append(tar: &mut tar::Builder<File>, name: &str, content: &[u8]) -> Result<()> {
    let mut header = header(0o644);
    header.set_size(content.len() as u64);
    tar.append_data(&mut header, name, Cursor::new(content)).with_context(|| format!("packing {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containerfile_of_a_static_binary_becomes_the_image_it_describes() {
        let dir = std::env::temp_dir().join(format!("portico-lab-image-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("Containerfile");
        let text = "FROM rust AS build\nRUN make\n\nFROM scratch\nCOPY --from=build /src/portico \
                    /portico\nUSER 65532:65532\nENTRYPOINT [\"/portico\"]\n";
        fs::write(&file, text).unwrap();
        let image = Image::from_containerfile("portico:lab", &file, &[("/src/portico", &file)]).unwrap();
        fs::write(&file, format!("{text}RUN chmod 755 /portico\n")).unwrap();
        let error = Image::from_containerfile("portico:lab", &file, &[("/src/portico", &file)]).unwrap_err();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(
            (image.user.as_str(), image.entrypoint.as_slice()),
            ("65532:65532", &["/portico".to_owned()][..])
        );
        assert_eq!(image.files[0].0, "portico");
        assert!(error.to_string().contains("RUN chmod"), "{error}");
    }
}
